"""One optimizer step over a rank's micro-batches.

The loss of a step is a mean over its *global* batch. Each micro-batch computes its share of that mean (a sum divided by
the global count), so shares add up to the same loss and gradient however the batch is split. Megatron averages where
shares must add: its schedule divides by the number of micro-batches and its DDP by the number of data-parallel ranks.
The scale below undoes both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_moe.batch import ROUTED_EXPERTS
from nemo_rl_moe.grpo.loss import grpo_loss
from nemo_rl_moe.grpo.types import TokenBatch
from nemo_rl_moe.policy.megatron.logprobs import token_logprobs
from nemo_rl_moe.policy.megatron.microbatch import Rows
from nemo_rl_moe.policy.megatron.optimizer import Trainer, apply_gradients, current_lr, gather_parameters, zero_grads
from nemo_rl_moe.policy.megatron.schedule import recorded_routing, run_schedule
from nemo_rl_moe.policy.step_shard import StepShard, loss_mask
from nemo_rl_moe.recipe.schema import LossConfig


def train_step(
    trainer: Trainer, step: StepShard, config: LossConfig, temperature: float, vocab_size: int
) -> dict[str, float]:
    """Forward, backward and update; collective over all ranks.

    Returns:
        On the last pipeline stage: the loss's metrics over the global batch. Everywhere: `grad_norm` (before clipping),
        `lr` (that of this step) and `skipped_steps` (1.0 when the loss or a gradient was not finite, or no token was
        in the loss, and nothing was updated); with router replay `router_agreement`.
    """
    from megatron.core import parallel_state as mpu

    device = trainer.device
    shard, mask = step.shard, loss_mask(step.shard.batch)
    # Routes go to the device with the rows that they belong to.
    values = {
        name: torch.from_numpy(v).to(device) for name, v in shard.batch.token_values.items() if name != ROUTED_EXPERTS
    }
    sequence_ids = torch.from_numpy(shard.batch.sequence_ids).to(device)
    scale = len(shard.microbatches) * mpu.get_data_parallel_world_size()
    group = mpu.get_tensor_model_parallel_group()

    def consume(logits: Tensor, sources: Tensor | None, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs, entropy = token_logprobs(
            logits,
            sources,
            rows.targets,
            temperature=temperature,
            vocab_size=vocab_size,
            group=group,
            with_entropy=True,
        )
        tokens = _token_batch(rows, logprobs, entropy, values, sequence_ids, len(shard.batch))
        loss, metrics = grpo_loss(config, tokens, step.counts)
        return loss * scale, metrics

    zero_grads(trainer)
    lr = current_lr(trainer)
    parts = run_schedule(trainer, shard, mask, consume, forward_only=False, routing=recorded_routing(trainer, shard))
    metrics = reduce_metrics(parts, mpu.get_data_parallel_group(with_context_parallel=True), device)
    # Without a token in the loss the gradient is 0, but momentum and weight decay would move the weights all the same.
    trainable = step.counts.tokens > 0 and math.isfinite(metrics.get("loss", 0.0))
    if trainer.replay is not None:
        metrics["router_agreement"] = trainer.replay.agreement(device)
    norm, updated = apply_gradients(trainer, trainable)
    return {**metrics, "grad_norm": norm, "lr": lr, "skipped_steps": 0.0 if updated else 1.0}


def train_steps(
    trainer: Trainer, steps: Sequence[StepShard], config: LossConfig, temperature: float, vocab_size: int
) -> dict[str, float]:
    """Several optimizer steps. Metrics are means, but for `*_max`, `*_min`, `skipped_steps` (sum), `lr` (last)."""
    results = [train_step(trainer, step, config, temperature, vocab_size) for step in steps]
    gather_parameters(trainer)
    merged = {}
    for name in results[0]:
        column = [r[name] for r in results]
        if name == "lr":
            merged[name] = column[-1]
        elif name == "skipped_steps":
            merged[name] = sum(column)
        elif name.endswith(("_max", "_min")):
            merged[name] = max(column) if name.endswith("_max") else min(column)
        else:
            merged[name] = sum(column) / len(column)
    return merged


def _token_batch(
    rows: Rows,
    logprobs: Tensor,
    entropy: Tensor | None,
    values: Mapping[str, Tensor],
    sequence_ids: Tensor,
    num_sequences: int,
) -> TokenBatch:
    """Only tokens that count in the loss are in it, so its mask is all ones."""

    def pick(name: str) -> Tensor | None:
        return values[name][rows.token_index] if name in values else None

    generation, advantages = pick("generation_logprobs"), pick("advantages")
    if generation is None or advantages is None:
        raise ValueError(f"training needs generation_logprobs and advantages, got {sorted(values)}")
    return TokenBatch(
        logprobs=logprobs,
        prev_logprobs=pick("prev_logprobs"),
        generation_logprobs=generation,
        reference_logprobs=pick("reference_logprobs"),
        advantages=advantages,
        mask=torch.ones_like(logprobs),
        sequence_ids=sequence_ids[rows.token_index],
        num_sequences=num_sequences,
        entropy=entropy,
    )


def reduce_metrics(
    parts: Sequence[Mapping[str, Tensor]], group: dist.ProcessGroup, device: torch.device
) -> dict[str, float]:
    """Joins the metrics of micro-batches and ranks: shares add, `*_max` and `*_min` take the extreme."""
    if not parts:
        return {}
    names = sorted(parts[0])
    added = [n for n in names if not n.endswith(("_max", "_min"))]
    extremes = [n for n in names if n.endswith(("_max", "_min"))]
    sums = torch.stack([torch.stack([p[n].detach().float() for p in parts]).sum() for n in added])
    dist.all_reduce(sums, group=group)
    result = dict(zip(added, sums.tolist(), strict=True))
    if extremes:
        signs = torch.tensor([1.0 if n.endswith("_max") else -1.0 for n in extremes], device=device)
        tops = torch.stack([torch.stack([p[n].detach().float() for p in parts]) for n in extremes])
        best = (tops * signs[:, None]).amax(1)
        dist.all_reduce(best, dist.ReduceOp.MAX, group=group)
        result |= dict(zip(extremes, (best * signs).tolist(), strict=True))
    return result
