"""Where each Hugging Face tensor lies in the one flat buffer that carries a model's weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

# A cache line: no two ranks that write neighbouring tensors share one, and every dtype is aligned.
ALIGNMENT = 64

_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class TensorSlot:
    """One tensor's place in the buffer.

    Attributes:
        name: Hugging Face name, such as `model.layers.0.self_attn.q_proj.weight`.
        dtype: `float32`, `bfloat16` or `float16`.
        shape: full (unsharded) shape.
        offset: first byte, a multiple of ALIGNMENT.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes, without the padding after it."""
        return self.numel * _DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class WeightLayout:
    """All tensors of a model in one uint8 buffer, in the given order, each at a multiple of ALIGNMENT bytes."""

    slots: tuple[TensorSlot, ...]

    @staticmethod
    def build(tensors: Iterable[tuple[str, torch.dtype | str, Iterable[int]]]) -> WeightLayout:
        """Lays out (name, dtype, full shape) one after the other.

        Raises:
            ValueError: a name comes twice, or a dtype that weights cannot have.
        """
        slots: list[TensorSlot] = []
        seen: set[str] = set()
        offset = 0
        for name, dtype, shape in tensors:
            dtype_name = str(dtype).removeprefix("torch.")
            if dtype_name not in _DTYPES:
                raise ValueError(f"{name}: dtype {dtype_name} cannot be refitted; known are {', '.join(_DTYPES)}")
            if name in seen:
                raise ValueError(f"{name}: comes twice in the weight layout")
            seen.add(name)
            slot = TensorSlot(name, dtype_name, tuple(int(n) for n in shape), offset)
            slots.append(slot)
            offset += -(-slot.nbytes // ALIGNMENT) * ALIGNMENT
        return WeightLayout(tuple(slots))

    @cached_property
    def nbytes(self) -> int:
        """Size of the buffer in bytes."""
        if not self.slots:
            return 0
        last = self.slots[-1]
        return last.offset + -(-last.nbytes // ALIGNMENT) * ALIGNMENT

    @cached_property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(slot.numel for slot in self.slots)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Name -> view into the buffer with the tensor's dtype and full shape; nothing is copied.

        Args:
            buffer: uint8 [nbytes], from `SharedBuffer.tensor` or any CPU memory.

        Raises:
            ValueError: the buffer is not of this layout's size.
        """
        if buffer.dtype != torch.uint8 or buffer.shape != (self.nbytes,):
            raise ValueError(
                f"weight buffer is {buffer.dtype} {tuple(buffer.shape)}, expected torch.uint8 ({self.nbytes},)"
            )
        return dict(self._iter_views(buffer))

    def _iter_views(self, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        for slot in self.slots:
            piece = buffer[slot.offset : slot.offset + slot.nbytes]
            yield slot.name, piece.view(_DTYPES[slot.dtype]).view(slot.shape)

    def to_plain(self) -> list[list]:
        """Lists and strings only, for messages between processes."""
        return [[slot.name, slot.dtype, list(slot.shape), slot.offset] for slot in self.slots]

    @staticmethod
    def from_plain(rows: Iterable[Iterable]) -> WeightLayout:
        """What `to_plain` gave.

        Raises:
            ValueError: the offsets are not those that `build` gives.
        """
        slots = tuple(TensorSlot(name, dtype, tuple(shape), offset) for name, dtype, shape, offset in rows)
        layout = WeightLayout(slots)
        if WeightLayout.build((s.name, s.dtype, s.shape) for s in slots) != layout:
            raise ValueError("weight layout has offsets other than the packed ones")
        return layout


def group_elements(tensors: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Elements by Hugging Face name, all experts of a layer taken together.

    Checkpoints name experts one by one or fused in one tensor; summed by layer both give the same.

    Args:
        tensors: (name, elements) of each tensor.
    """
    groups: Counter[str] = Counter()
    for name, numel in tensors:
        head, marker, _ = name.partition(".experts.")
        groups[head + marker.rstrip(".")] += numel
    return dict(groups)
