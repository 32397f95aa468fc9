"""Process group and Megatron's parallel state, and where this rank stands in it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.schema.policy import MegatronConfig


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the parallel groups and this rank's place in each.

    Dense weights are split over tp and pp and copied over dp x cp; expert weights are split over ep, etp and pp and
    copied over edp. Both views cover the same ranks: tp x cp x dp = ep x etp x edp.

    Attributes:
        rank, world_size: in the whole job.
        tp_size, tp_rank: tensor parallel.
        pp_size, pp_rank: pipeline parallel.
        cp_size, cp_rank: context parallel.
        dp_size, dp_rank: data parallel, without context parallel.
        ep_size, ep_rank: expert parallel.
        etp_size, etp_rank: tensor parallel inside each expert.
        edp_size, edp_rank: copies of the same experts.
    """

    rank: int = 0
    world_size: int = 1
    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    cp_size: int = 1
    cp_rank: int = 0
    dp_size: int = 1
    dp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0
    etp_size: int = 1
    etp_rank: int = 0
    edp_size: int = 1
    edp_rank: int = 0

    @property
    def is_first_stage(self) -> bool:
        """Holds the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Holds the final norm and the head, and computes the loss."""
        return self.pp_rank == self.pp_size - 1


def initialize(
    cfg: MegatronConfig,
    store: dist.Store,
    rank: int,
    world_size: int,
    device: torch.device,
    seed: int,
    timeout_s: float,
) -> ParallelLayout:
    """Joins the other ranks at the store, makes Megatron's groups and seeds its generators. Collective.

    Args:
        store: a TCPStore that all ranks have opened.
        device: cpu (gloo) or cuda (nccl).
        seed: the same on all ranks; Megatron derives one for each tensor, pipeline and expert rank.
        timeout_s: limit of every collective in seconds.

    Raises:
        UserError: the sizes do not divide the number of ranks.
    """
    _check_sizes(cfg, world_size)
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=cfg.tensor_model_parallel_size,
        pipeline_model_parallel_size=cfg.pipeline_model_parallel_size,
        context_parallel_size=cfg.context_parallel_size,
        expert_model_parallel_size=cfg.expert_model_parallel_size,
        expert_tensor_parallel_size=cfg.expert_tensor_parallel_size,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
        # Only CPU offload of distributed checkpoints needs a second set of groups.
        create_gloo_process_groups=False,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    return current_layout()


def current_layout() -> ParallelLayout:
    """This rank's place in Megatron's initialized parallel state."""
    from megatron.core import parallel_state as mpu

    return ParallelLayout(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tp_size=mpu.get_tensor_model_parallel_world_size(),
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        pp_size=mpu.get_pipeline_model_parallel_world_size(),
        pp_rank=mpu.get_pipeline_model_parallel_rank(),
        cp_size=mpu.get_context_parallel_world_size(),
        cp_rank=mpu.get_context_parallel_rank(),
        dp_size=mpu.get_data_parallel_world_size(),
        dp_rank=mpu.get_data_parallel_rank(),
        ep_size=mpu.get_expert_model_parallel_world_size(),
        ep_rank=mpu.get_expert_model_parallel_rank(),
        etp_size=mpu.get_expert_tensor_parallel_world_size(),
        etp_rank=mpu.get_expert_tensor_parallel_rank(),
        edp_size=mpu.get_expert_data_parallel_world_size(),
        edp_rank=mpu.get_expert_data_parallel_rank(),
    )


def destroy() -> None:
    """Leaves Megatron's groups and the process group, so that `initialize` can be called again."""
    from megatron.core import parallel_state as mpu

    if mpu.model_parallel_is_initialized():
        mpu.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def _check_sizes(cfg: MegatronConfig, world_size: int) -> None:
    dense = cfg.tensor_model_parallel_size * cfg.pipeline_model_parallel_size * cfg.context_parallel_size
    expert = cfg.expert_tensor_parallel_size * cfg.expert_model_parallel_size * cfg.pipeline_model_parallel_size
    for sizes, product in (
        ("tensor x pipeline x context", dense),
        ("expert_tensor x expert_model x pipeline", expert),
    ):
        if world_size % product:
            raise UserError(
                f"policy.megatron_cfg: {sizes} parallel size is {product}, which does not divide the {world_size} "
                "policy ranks"
            )
