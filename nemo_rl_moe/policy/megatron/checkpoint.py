"""Trainer state on disk in Megatron's sharded format (torch_dist): weights, optimizer, schedule, random numbers.

With the distributed optimizer a checkpoint can be read back under any parallel layout. Learning rate and weight decay
come from the recipe at hand, not from the checkpoint: only the number of steps done is restored.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_moe.errors import UserError
from nemo_rl_moe.policy.megatron.optimizer import Trainer, gather_parameters

# Every parameter's optimizer state is stored under the parameter's own name and shape.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def save_checkpoint(trainer: Trainer, folder: str) -> None:
    """Writes the state into the folder, which rank 0 makes; collective over all ranks."""
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    gather_parameters(trainer)
    _collect_results_in_process()
    dist_checkpointing.save(_request(trainer, is_loading=False), folder)
    dist.barrier()


def load_checkpoint(trainer: Trainer, folder: str) -> None:
    """Reads what `save_checkpoint` wrote; collective over all ranks.

    Raises:
        UserError: the folder holds no checkpoint of this format, or one of another model.
    """
    from megatron.core import dist_checkpointing

    if not dist_checkpointing.check_is_distributed_checkpoint(folder):
        raise UserError(f"{folder}: not a trainer checkpoint (no metadata.json in it)")
    common = dist_checkpointing.load_common_state_dict(folder)
    same_ranks = common["world_size"] == dist.get_world_size()
    request = _request(trainer, is_loading=True, with_random=same_ranks)
    _check_fit(folder, request["model"])
    state = dist_checkpointing.load(request, folder)
    # Every weight was asked for by name and shape above; what may be missing is extra state of Megatron's modules.
    trainer.model[0].load_state_dict(state["model"], strict=False)
    for i, part in enumerate(_parts(trainer)):
        _load_optimizer(part, state["optimizer"][str(i)], common["optimizer_steps"])
    trainer.scheduler.num_steps = 0
    trainer.scheduler.step(common["scheduler_steps"])
    if same_ranks:
        _set_random_state(state["random"])


def _check_fit(folder: str, model: dict[str, Any]) -> None:
    """Compares names and full shapes; Megatron would end the process with all names of both sides.

    Raises:
        UserError: naming the first weights that are missing or of another shape.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    stored = {name: tuple(t.global_shape) for name, t in dist_checkpointing.load_tensors_metadata(folder).items()}
    wrong = {}
    for wanted in (t for t in nested_values(model) if isinstance(t, ShardedTensor)):
        found = stored.get(wanted.key)
        if found != tuple(wanted.global_shape):
            wrong[wanted.key] = f"{wanted.key} is {found or 'missing'}, expected {tuple(wanted.global_shape)}"
    if wrong:
        raise UserError(f"{folder}: the checkpoint does not fit the model: {'; '.join(list(wrong.values())[:5])}")


def _collect_results_in_process() -> None:
    """Spares the server process through which Megatron collects the results of asynchronous writers.

    It takes seconds to start, and it outlives a worker that is killed. A save that is waited for needs only a queue.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if hasattr(filesystem_async, "_results_queue"):
        filesystem_async._results_queue = Queue()


def _request(trainer: Trainer, *, is_loading: bool, with_random: bool = True) -> dict[str, Any]:
    """What to write or read: Megatron's sharded tensors, and a few numbers that are the same on all ranks."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    rank, size = dist.get_rank(), dist.get_world_size()
    model = trainer.model[0].sharded_state_dict()
    parts = _parts(trainer)
    request: dict[str, Any] = {
        "model": model,
        "optimizer": {str(i): _optimizer_request(part, model, is_loading) for i, part in enumerate(parts)},
        "optimizer_steps": _optimizer_steps(parts),
        "scheduler_steps": trainer.scheduler.num_steps,
        "world_size": size,
    }
    if with_random:
        request["random"] = ShardedObject("random", _random_state(), (size,), (rank,))
    return request


def _parts(trainer: Trainer) -> list[Any]:
    """Megatron keeps one optimizer for dense weights and, under expert parallelism, a second one for experts."""
    return getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])


def _optimizer_request(part: Any, model: dict[str, Any], is_loading: bool) -> dict[str, Any]:
    """The distributed optimizer's own numbers are left out: they differ with the layout, and are known anyway."""
    _ensure_state(part)
    state = part.sharded_state_dict(model, is_loading=is_loading, metadata=_METADATA)
    return {"param_state": state["param_state"]} if "param_state" in state else state


def _load_optimizer(part: Any, loaded: dict[str, Any], steps: int) -> None:
    if "param_state" in loaded:
        own = part.state_dict()
        for group in own["optimizer"]["param_groups"]:
            group["step"] = steps
        loaded = own | loaded | {"param_state_sharding_type": _METADATA["distrib_optim_sharding_type"]}
    part.load_state_dict(loaded)
    # Megatron gives all parameters one and the same tensor, in which each parameter's update would count a step.
    for state in part.optimizer.state.values():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].clone()


def _optimizer_steps(parts: list[Any]) -> int:
    """Updates made so far: in the state of torch's Adam, in the parameter groups of Transformer Engine's."""
    inner = [part.optimizer for part in parts]
    steps = [int(s["step"]) for optimizer in inner for s in optimizer.state.values() if "step" in s]
    steps += [int(g["step"]) for optimizer in inner for g in optimizer.param_groups if "step" in g]
    return max(steps, default=0)


def _ensure_state(part: Any) -> None:
    """Gives torch's Adam the zeros that its first step starts from, for without them Megatron finds no state to map.

    Transformer Engine's Adam is initialized by Megatron itself.
    """
    inner = part.optimizer
    if not isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
        return
    for parameter in (p for group in inner.param_groups for p in group["params"]):
        if not inner.state[parameter]:
            zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            inner.state[parameter] = {"step": torch.tensor(0.0), **zeros}
    if hasattr(part, "_set_main_param_and_optimizer_states"):
        part._set_main_param_and_optimizer_states = partial(_set_states, part)


def _set_states(part: Any, model_parameter: Any, tensors: dict[str, Any]) -> None:
    """Puts loaded state in place, leaving `step` as it is.

    Megatron's method of this name copies every entry of the state, but loads `step` another way and never passes it.
    """
    group, order = part.model_param_group_index_map[model_parameter]
    main = part.optimizer.param_groups[group]["params"][order]
    for name, target in {"param": main, **part.optimizer.state[main]}.items():
        if name != "step":
            target.copy_(tensors[name])


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
