"""A micro-batch's sequences as the tensors that a Megatron model takes.

What is padding is known from lengths alone: a pad slot holds token 0, and nothing ever asks which token it holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

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
        families: (tokens of the shared prompt, tokens of each response) in the order in which they lie in row 0; empty
            when nothing is shared.
        sources: int64 [n], slots b * S + s whose logits predict the n wanted tokens; the last slot of a shared prompt
            predicts the first token of each response.
        targets: int64 [n], ids of the wanted tokens.
        token_index: int64 [n], their positions in the shard's per-token arrays.
        pads: bool [B, S], True where a slot holds no token; None when nobody asked for it.
    """

    tokens: Tensor
    position_ids: Tensor
    lengths: tuple[int, ...]
    packed: bool
    families: tuple[tuple[int, tuple[int, ...]], ...]
    sources: Tensor
    targets: Tensor
    token_index: Tensor
    pads: Tensor | None = None


def build_rows(
    batch: SequenceBatch,
    microbatch: Microbatch,
    wanted: NDArray[np.bool_],
    device: torch.device | str,
    mark_pads: bool = False,
) -> Rows:
    """Lays the micro-batch's sequences into rows.

    Args:
        batch: the shard's sequences; T tokens.
        microbatch: which of them, and the shape of the rows.
        wanted: bool [T], tokens whose log-probability is wanted; the first token of a sequence never has one, and of a
            shared prompt only its first sequence's copy is there.
        mark_pads: also say which slots are pads.
    """
    place = _shared_places(batch, microbatch) if microbatch.families else _places(batch, microbatch)
    total = microbatch.rows * microbatch.row_length
    tokens, positions = np.zeros(total, dtype=np.int64), np.zeros(total, dtype=np.int64)
    tokens[place.slots], positions[place.slots] = batch.tokens[place.index], place.within
    pads = np.ones(total, dtype=np.bool_)
    pads[place.slots] = False
    picked = np.flatnonzero((place.within > 0) & wanted[place.index])

    def on_device(values: NDArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device, non_blocking=True)

    shape = (microbatch.rows, microbatch.row_length)
    return Rows(
        tokens=on_device(tokens.reshape(shape)),
        position_ids=on_device(positions.reshape(shape)),
        lengths=tuple(batch.lengths[list(microbatch.samples)].tolist()),
        packed=microbatch.packed,
        families=place.families,
        sources=on_device(place.before[picked]),
        targets=on_device(batch.tokens[place.index[picked]].astype(np.int64)),
        token_index=on_device(place.index[picked]),
        pads=on_device(pads.reshape(shape)) if mark_pads else None,
    )


@dataclass(frozen=True)
class _Places:
    """Where tokens lie: int64 arrays of one entry for each token of the rows, pads left out.

    Attributes:
        index: position in the batch's per-token arrays.
        within: position in its sequence.
        slots: slot b * S + s in the rows.
        before: slot of the token before it; of a sequence's first token it means nothing.
        families: as in Rows.
    """

    index: NDArray[np.int64]
    within: NDArray[np.int64]
    slots: NDArray[np.int64]
    before: NDArray[np.int64]
    families: tuple[tuple[int, tuple[int, ...]], ...] = ()


def _places(batch: SequenceBatch, microbatch: Microbatch) -> _Places:
    samples = list(microbatch.samples)
    lengths = batch.lengths[samples]
    index = batch.token_index(samples)
    within = np.arange(len(index)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    if microbatch.packed:
        slots = np.arange(len(index))
    else:
        slots = np.repeat(np.arange(len(samples)), lengths) * microbatch.row_length + within
    return _Places(index, within, slots, slots - 1)


def _shared_places(batch: SequenceBatch, microbatch: Microbatch) -> _Places:
    """Each family's prompt, taken from its first sequence, and then its responses."""
    offsets = batch.offsets
    index, within, before, families = [], [], [], []
    samples, slot = iter(microbatch.samples), 0
    for count, prompt in microbatch.families:
        members = list(islice(samples, count))
        first, prompt_end = offsets[members[0]], slot + prompt - 1
        index.append(np.arange(first, first + prompt))
        within.append(np.arange(prompt))
        before.append(np.arange(slot - 1, prompt_end))
        slot += prompt
        for i in members:
            size = int(batch.lengths[i]) - prompt
            index.append(np.arange(offsets[i] + prompt, offsets[i + 1]))
            within.append(np.arange(prompt, prompt + size))
            before.append(np.array([prompt_end, *range(slot, slot + size - 1)][:size], dtype=np.int64))
            slot += size
        families.append((prompt, tuple(int(batch.lengths[i]) - prompt for i in members)))
    return _Places(
        np.concatenate(index), np.concatenate(within), np.arange(slot), np.concatenate(before), tuple(families)
    )


def iterate_rows(
    shard: RankShard, wanted: NDArray[np.bool_], device: torch.device | str, mark_pads: bool = False
) -> Iterator[Rows]:
    """The shard's micro-batches, one after the other, built only when asked for."""
    for microbatch in shard.microbatches:
        yield build_rows(shard.batch, microbatch, wanted, device, mark_pads)
