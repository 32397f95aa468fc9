"""megatron-core on a CPU: gloo collectives, no CUDA, no Transformer Engine. Everything CPU-specific is in this module.

`install()` patches torch and megatron-core in the calling process, so it belongs in worker processes that exist for
Megatron, before the first import of `megatron.core`. It covers megatron-core 0.16 to 0.19; a patch whose target a
version lacks is skipped. What Megatron computes is not changed, only where it believes it runs.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_CPU = torch.device("cpu")
_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange", "rand", "randn")
_INSTALLED = "_nemo_rl_moe_cpu_backend"


def install() -> None:
    """Makes megatron-core run without a GPU. Does nothing with CUDA, or when called again."""
    if torch.cuda.is_available() or getattr(torch, _INSTALLED, False):
        return
    setattr(torch, _INSTALLED, True)
    _patch_devices()
    _patch_streams()
    _patch_random_numbers()
    _patch_tensor_types()
    _patch_collectives()
    _patch_megatron()


class _Event:
    """An event that has always happened: on a CPU every operation is done when its call returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        """Nothing to record."""

    def wait(self, *_: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Always done."""
        return True

    def elapsed_time(self, _: _Event) -> float:
        """Milliseconds; no event takes any."""
        return 0.0


class _Stream(_Event):
    """The one stream there is."""

    def wait_stream(self, _: _Stream) -> None:
        """Nothing to wait for."""

    def wait_event(self, _: _Event) -> None:
        """Nothing to wait for."""

    def record_event(self, event: _Event | None = None) -> _Event:
        """An event that has happened."""
        return event or _Event()


def _patch_devices() -> None:
    """`cuda` means the CPU. Megatron allocates buffers on literal device="cuda" and on the current CUDA device."""
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment,return-value]
    torch.cuda.set_device = lambda _: None
    torch.cuda.synchronize = lambda *_, **__: None
    # Memory reports and pools are asked for in passing; there is nothing to report or free.
    torch.cuda.empty_cache = lambda: None
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign,assignment]
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = _CPU
            # Pinned memory is a property of transfers to a GPU; torch refuses it without one.
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return on_cpu


def _patch_streams() -> None:
    """Megatron orders copies and reductions with streams and events; on a CPU they are in order already."""
    stream = _Stream()
    torch.cuda.Stream = _Stream  # type: ignore[assignment,misc]
    torch.cuda.Event = _Event  # type: ignore[assignment,misc]
    torch.cuda.current_stream = lambda *_: stream  # type: ignore[assignment,return-value]
    torch.cuda.default_stream = lambda *_: stream  # type: ignore[assignment,return-value]
    torch.cuda.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment,return-value]
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign,assignment]


def _patch_random_numbers() -> None:
    """The CUDA generator is the CPU generator: model-parallel seeds and recomputation save and restore it."""
    torch.cuda.manual_seed = torch.default_generator.manual_seed
    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _patch_tensor_types() -> None:
    """Megatron's optimizers sort parameters by `type() == "torch.cuda.FloatTensor"`; only they are answered so."""
    tensor_type = torch.Tensor.type

    def type_name(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = tensor_type(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(found, str) and caller.startswith("megatron.core.optimizer"):
            return found.replace("torch.", "torch.cuda.", 1)
        return found

    torch.Tensor.type = type_name  # type: ignore[method-assign]


def _patch_collectives() -> None:
    """Under EP and ETP, ranks gather and reduce parts of unequal length; nccl takes them, gloo wants them equal."""
    all_gather, reduce_scatter = dist.all_gather, dist.reduce_scatter

    def all_gather_any(tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if async_op or _equal_shapes(tensor_list):
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        parts = _exchange([tensor] * len(tensor_list), [len(t) for t in tensor_list], group)
        for target, part in zip(tensor_list, parts, strict=True):
            target.copy_(part)
        return None

    def reduce_scatter_any(
        output: Tensor, input_list: list[Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if async_op or op != dist.ReduceOp.SUM or _equal_shapes(input_list):
            return reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
        parts = _exchange(input_list, [len(output)] * len(input_list), group)
        output.copy_(torch.stack(parts).sum(0))
        return None

    dist.all_gather, dist.reduce_scatter = all_gather_any, reduce_scatter_any


def _equal_shapes(tensors: list[Tensor]) -> bool:
    return all(t.shape == tensors[0].shape for t in tensors)


def _exchange(send: list[Tensor], receive_rows: list[int], group: Any) -> list[Tensor]:
    """Sends one tensor to each rank of the group; returns what each sent here. Gloo's all-to-all takes any lengths."""
    received = send[0].new_empty((sum(receive_rows), *send[0].shape[1:]))
    dist.all_to_all_single(received, torch.cat(send), receive_rows, [len(t) for t in send], group=group)
    return list(received.split(receive_rows))


def _patch_megatron() -> None:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # These setters go through torch.cuda's deferred initialisation, which never comes on a CPU.
    if hasattr(random, "_get_cuda_rng_state"):
        random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
        random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # 0.16 binds this name only when Transformer Engine can be imported, but reads it always.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # all-to-all split sizes are turned into numbers only for CUDA tensors; gloo takes no tensors as sizes.
    for module in (moe_utils, token_dispatcher):
        if hasattr(module, "maybe_move_tensor_to_cpu"):
            module.maybe_move_tensor_to_cpu = _to_numpy


def _to_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
