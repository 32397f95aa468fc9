"""Trainer state on disk in Megatron's sharded format (torch_dist): weights, optimizer, schedule, random numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_moe.errors import UserError
from nemo_rl_moe.policy.megatron.optimizer import Trainer, gather_parameters

# Every parameter's optimizer state is stored under the parameter's own name and shape, so that a checkpoint can be read
# back under another parallel layout.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def save_checkpoint(trainer: Trainer, folder: str) -> None:
    """Writes the state into the folder, which rank 0 makes; collective over all ranks."""
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    gather_parameters(trainer)
    dist_checkpointing.save(_state(trainer, is_loading=False), folder)
    dist.barrier()


def load_checkpoint(trainer: Trainer, folder: str) -> None:
    """Reads what `save_checkpoint` wrote; collective over all ranks.

    Raises:
        UserError: the folder holds no checkpoint of this format.
    """
    from megatron.core import dist_checkpointing

    if not dist_checkpointing.check_is_distributed_checkpoint(folder):
        raise UserError(f"{folder}: not a trainer checkpoint (no metadata.json in it)")
    state = dist_checkpointing.load(_state(trainer, is_loading=True), folder)
    trainer.model[0].load_state_dict(state["model"], strict=False)
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.scheduler.load_state_dict(state["scheduler"])
    _set_random_state(state["random"])


def _state(trainer: Trainer, is_loading: bool) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    rank, size = dist.get_rank(), dist.get_world_size()
    # Megatron puts optimizer state tensors beside the parameters they belong to.
    model = trainer.model[0].sharded_state_dict()
    return {
        "model": model,
        "optimizer": trainer.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=_METADATA),
        "scheduler": trainer.scheduler.state_dict(),
        "random": ShardedObject("random", _random_state(), (size,), (rank,)),
    }


def _random_state() -> dict[str, Any]:
    from megatron.core import tensor_parallel

    state = {"torch": torch.get_rng_state(), "tracker": tensor_parallel.get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    from megatron.core import tensor_parallel

    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
