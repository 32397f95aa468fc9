"""A micro-batch's sequences as the tensors that a Megatron model takes.

What is padding is known from lengths alone: a pad slot holds token 0, and nothing ever asks which token it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_rl_moe.batch import ROUTED_EXPERTS, SequenceBatch
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
        routes: int8 or int16 [B, S, L, K], recorded experts of each slot in each layer, -1 where there are none; None
            when the batch carries none.
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
    routes: Tensor | None = None


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
    routes = None
    if (recorded := batch.token_values.get(ROUTED_EXPERTS)) is not None:
        routes = np.full((total, *recorded.shape[1:]), -1, dtype=recorded.dtype)
        routes[place.slots] = recorded[place.index]

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
        routes=None if routes is None else on_device(routes.reshape(*shape, *routes.shape[1:])),
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


def token_slots(batch: SequenceBatch, microbatch: Microbatch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each token of the micro-batch's sequences is computed.

    Returns:
        int64 [n] positions in the batch's per-token arrays, and int64 [n] slots b * S + s. A slot of a shared prompt
        comes once for each sequence that has the prompt.
    """
    if not microbatch.families:
        place = _places(batch, microbatch)
        return place.index, place.slots
    offsets = batch.offsets
    index, slots = [], []
    samples, slot = iter(microbatch.samples), 0
    for count, prompt in microbatch.families:
        start = slot
        slot += prompt
        for i in islice(samples, count):
            size = int(batch.lengths[i]) - prompt
            index.append(np.arange(offsets[i], offsets[i + 1]))
            slots += [np.arange(start, start + prompt), np.arange(slot, slot + size)]
            slot += size
    return np.concatenate(index), np.concatenate(slots)


def scatter_records(shard: RankShard, records: Sequence[Tensor]) -> NDArray:
    """What was recorded of each slot, for each token.

    Args:
        records: [B, S, ...] of each of the shard's micro-batches.

    Returns:
        [T, ...], in the order of the shard's tokens.
    """
    first = records[0]
    out = np.empty((len(shard.batch.tokens), *first.shape[2:]), dtype=first.numpy().dtype)
    for microbatch, record in zip(shard.microbatches, records, strict=True):
        # The pass may have made rows longer than planned (prepadding).
        index, slots = token_slots(shard.batch, replace(microbatch, row_length=record.shape[1]))
        out[index] = record.flatten(0, 1).numpy()[slots]
    return out


def iterate_rows(
    shard: RankShard, wanted: NDArray[np.bool_], device: torch.device | str, mark_pads: bool = False
) -> Iterator[Rows]:
    """The shard's micro-batches, one after the other, built only when asked for."""
    for microbatch in shard.microbatches:
        yield build_rows(shard.batch, microbatch, wanted, device, mark_pads)
