"""A micro-batch's sequences as the tensors that a Megatron model takes.

What is padding is known from lengths alone: a pad slot holds token 0, and nothing ever asks which token it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_rl_moe.batch import SequenceBatch
from nemo_rl_moe.policy.packing import Microbatch, RankShard


@dataclass(frozen=True)
class Rows:
    """One micro-batch on the device: B rows of S tokens.

    Attributes:
        tokens: int64 [B, S].
        position_ids: int64 [B, S], from 0 in each sequence; pads are 0.
        lengths: tokens of each sequence, in the order in which they lie in the rows.
        packed: True when all sequences share row 0.
        sources: int64 [n], slots b * S + s whose logits predict the n wanted tokens.
        targets: int64 [n], ids of the wanted tokens.
        token_index: int64 [n], their positions in the shard's per-token arrays.
    """

    tokens: Tensor
    position_ids: Tensor
    lengths: tuple[int, ...]
    packed: bool
    sources: Tensor
    targets: Tensor
    token_index: Tensor


def build_rows(
    batch: SequenceBatch, microbatch: Microbatch, wanted: NDArray[np.bool_], device: torch.device | str
) -> Rows:
    """Lays the micro-batch's sequences into rows.

    Args:
        batch: the shard's sequences; T tokens.
        microbatch: which of them, and the shape of the rows.
        wanted: bool [T], tokens whose log-probability is wanted; the first token of a sequence never has one.
    """
    samples = list(microbatch.samples)
    lengths = batch.lengths[samples]
    index = batch.token_index(samples)
    starts = np.cumsum(lengths) - lengths
    within = np.arange(len(index)) - np.repeat(starts, lengths)
    if microbatch.packed:
        slots = np.arange(len(index))
    else:
        slots = np.repeat(np.arange(len(samples)), lengths) * microbatch.row_length + within
    total = microbatch.rows * microbatch.row_length
    tokens, positions = np.zeros(total, dtype=np.int64), np.zeros(total, dtype=np.int64)
    tokens[slots], positions[slots] = batch.tokens[index], within
    picked = np.flatnonzero((within > 0) & wanted[index])

    def on_device(values: NDArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device, non_blocking=True)

    shape = (microbatch.rows, microbatch.row_length)
    return Rows(
        tokens=on_device(tokens.reshape(shape)),
        position_ids=on_device(positions.reshape(shape)),
        lengths=tuple(lengths.tolist()),
        packed=microbatch.packed,
        sources=on_device(slots[picked] - 1),
        targets=on_device(batch.tokens[index[picked]].astype(np.int64)),
        token_index=on_device(index[picked]),
    )


def iterate_rows(
    shard: RankShard, wanted: NDArray[np.bool_], device: torch.device | str, order: Sequence[Microbatch] | None = None
) -> Iterator[Rows]:
    """The shard's micro-batches, one after the other, built only when asked for."""
    for microbatch in order or shard.microbatches:
        yield build_rows(shard.batch, microbatch, wanted, device)
