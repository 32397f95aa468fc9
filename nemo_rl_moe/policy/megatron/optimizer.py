"""Megatron's DistributedDataParallel, optimizer and learning-rate schedule, from the recipe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nemo_rl_moe.errors import UserError
from nemo_rl_moe.policy.megatron.head import HeadRows
from nemo_rl_moe.policy.megatron.prepadding import EqualRows, keep_pads_from_experts
from nemo_rl_moe.recipe.schema.policy import PolicyConfig

if TYPE_CHECKING:
    from nemo_rl_moe.policy.megatron.router_replay import ExpertReplay


@dataclass
class Trainer:
    """The parts that one optimizer step works on.

    Attributes:
        model: one DistributedDataParallel-wrapped chunk.
        optimizer: Megatron's (chained) optimizer.
        scheduler: Megatron's OptimizerParamScheduler; one unit is one optimizer step.
        head: the model's output layer, told which rows to compute.
        equal_rows: makes or checks equal row lengths over an expert group.
        replay: records and replays which experts tokens go to; None when the recipe asks for neither.
        max_grad_norm: gradients of a larger norm are scaled down to it; 0 never scales.
        slots: tokens that went through the model so far, pads included.
    """

    model: list[Any]
    optimizer: Any
    scheduler: Any
    head: HeadRows
    equal_rows: EqualRows
    max_grad_norm: float
    replay: ExpertReplay | None = None
    slots: int = 0

    @property
    def device(self) -> torch.device:
        """Where the parameters lie."""
        return next(self.model[0].parameters()).device


def build_trainer(model: Sequence[Any], policy: PolicyConfig) -> Trainer:
    """Wraps the model chunks and makes their optimizer. Megatron's parallel state must be initialized.

    Raises:
        UserError: the distributed optimizer is asked for with another update rule than adam, or router replay of a
            model without experts.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    cfg = policy.megatron_cfg
    distributed = cfg.optimizer.use_distributed_optimizer
    if distributed and cfg.optimizer.optimizer != "adam":
        raise UserError(
            "policy.megatron_cfg.optimizer.use_distributed_optimizer: Megatron shards the state of adam only; expected "
            f"false with optimizer {cfg.optimizer.optimizer}"
        )
    transformer_config = model[0].config
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed,
        overlap_grad_reduce=cfg.distributed_data_parallel_config.overlap_grad_reduce,
        overlap_param_gather=distributed and cfg.distributed_data_parallel_config.overlap_param_gather,
        grad_reduce_in_fp32=cfg.distributed_data_parallel_config.grad_reduce_in_fp32,
    )
    wrapped = []
    for chunk in model:
        inner = Float16Module(transformer_config, chunk) if policy.precision == "bfloat16" else chunk
        wrapped.append(DistributedDataParallel(transformer_config, ddp_config, inner))
    transformer_config.finalize_model_grads_func = finalize_model_grads
    if ddp_config.overlap_grad_reduce:
        transformer_config.no_sync_func = wrapped[0].no_sync
    if ddp_config.overlap_param_gather:
        transformer_config.param_sync_func = wrapped[0].start_param_sync
    optimizer = get_megatron_optimizer(_optimizer_config(policy), wrapped, use_gloo_process_groups=False)
    replay = None
    if policy.router_replay.enabled:
        # Imported here: it is a subclass of Megatron's, which must not be imported before the CPU backend is there.
        from nemo_rl_moe.policy.megatron.router_replay import ExpertReplay

        replay = ExpertReplay(model, policy.router_replay.measure_only)
    equal_rows = EqualRows(cfg)
    if equal_rows.pads:
        keep_pads_from_experts(wrapped)
    return Trainer(
        wrapped,
        optimizer,
        _scheduler(optimizer, policy),
        HeadRows(wrapped),
        equal_rows,
        policy.max_grad_norm,
        replay,
    )


def _optimizer_config(policy: PolicyConfig) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    cfg, bf16 = policy.megatron_cfg.optimizer, policy.precision == "bfloat16"
    return OptimizerConfig(
        optimizer=cfg.optimizer,
        lr=cfg.lr,
        min_lr=cfg.min_lr,
        weight_decay=cfg.weight_decay,
        adam_beta1=cfg.adam_beta1,
        adam_beta2=cfg.adam_beta2,
        adam_eps=cfg.adam_eps,
        sgd_momentum=cfg.sgd_momentum,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=cfg.use_distributed_optimizer,
        overlap_param_gather=cfg.use_distributed_optimizer
        and policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather,
        clip_grad=policy.max_grad_norm,
    )


def _scheduler(optimizer: Any, policy: PolicyConfig) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    cfg, schedule = policy.megatron_cfg.optimizer, policy.megatron_cfg.scheduler
    return OptimizerParamScheduler(
        optimizer,
        init_lr=schedule.lr_warmup_init,
        max_lr=cfg.lr,
        min_lr=min(cfg.min_lr, cfg.lr),
        lr_warmup_steps=schedule.lr_warmup_iters,
        # The decay must end after the warm-up, also where a constant schedule makes its end meaningless.
        lr_decay_steps=max(schedule.lr_decay_iters, schedule.lr_warmup_iters + 1),
        lr_decay_style=schedule.lr_decay_style,
        start_wd=cfg.weight_decay,
        end_wd=cfg.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def current_lr(trainer: Trainer) -> float:
    """Learning rate of the next optimizer step."""
    return float(trainer.optimizer.param_groups[0]["lr"])


def zero_grads(trainer: Trainer) -> None:
    """Clears gradients, also those left by a step that failed."""
    for chunk in trainer.model:
        chunk.zero_grad_buffer()
    trainer.optimizer.zero_grad()


def gather_parameters(trainer: Trainer) -> None:
    """Waits until every rank holds all updated parameters, so that they can be read outside of a forward pass."""
    for chunk in trainer.model:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


@torch.no_grad()
def apply_gradients(trainer: Trainer, trainable: bool) -> tuple[float, bool]:
    """One optimizer and schedule step, unless a rank says that it must not be or has a gradient that is not finite.

    Megatron checks for overflow only in float16, so one NaN would spoil all weights; here the step is left out.

    Returns:
        The gradient norm before clipping, and whether weights were updated (the same on all ranks).
    """
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    optimizer = trainer.optimizer
    overflow = optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    bad = torch.tensor([float(overflow or not trainable or not math.isfinite(norm))])
    bad = bad.to(trainer.device)
    dist.all_reduce(bad, dist.ReduceOp.MAX)
    if bad.item():
        return norm, False
    if trainer.max_grad_norm > 0:
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            parameters = part.get_parameters()
            if parameters:
                clip_grad_by_total_norm_fp32(parameters, trainer.max_grad_norm, norm)
    optimizer.step_with_ready_grads()
    trainer.scheduler.step(1)
    return norm, True
