"""Which samples go through the model together: the micro-batches of one pass, planned on the driver from lengths alone.

Two forms. Packed: one row for each micro-batch, its sequences one after the other; sequences with the same prompt may
hold it once (shared_prompts.py). Padded: one row for each sequence.
This is the only place that decides how long a row is, so that no two ranks can pad the same micro-batch differently.

Every data-parallel rank gets the same number of micro-batches: expert and pipeline parallelism run collectives inside
each of them, and a rank with one fewer would leave its peers waiting.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from nemo_rl_moe.batch import IntArray, SequenceBatch
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.policy.shared_prompts import Family, split_families


@dataclass(frozen=True)
class Microbatch:
    """One forward pass.

    Attributes:
        samples: which sequences, as indices into the batch that was planned; may be empty (padding only).
        rows: rows of the token tensor; 1 when packed.
        row_length: tokens of each row, padding included.
        packed: True when all sequences share one row.
        families: (sequences, tokens of the prompt they share) one after the other, covering `samples`; empty when
            nothing is shared.
    """

    samples: tuple[int, ...]
    rows: int
    row_length: int
    packed: bool
    families: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class MicrobatchPlan:
    """Micro-batches of each data-parallel rank.

    Attributes:
        ranks: `ranks[r][i]` is the i-th of rank r.
        num_tokens: tokens to compute over all ranks, without padding; a shared prompt counts once.
    """

    ranks: tuple[tuple[Microbatch, ...], ...]
    num_tokens: int

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of each rank."""
        return len(self.ranks[0])

    @property
    def num_slots(self) -> int:
        """Tokens that go through the model over all ranks, padding included."""
        return sum(m.rows * m.row_length for rank in self.ranks for m in rank)

    def rank_samples(self, rank: int) -> list[int]:
        """Samples of the rank, micro-batch by micro-batch."""
        return [i for m in self.ranks[rank] for i in m.samples]

    def shard(self, batch: SequenceBatch, rank: int) -> RankShard:
        """The rank's part of the batch that was planned, micro-batches renumbered to index into it."""
        renumbered, start = [], 0
        for m in self.ranks[rank]:
            renumbered.append(replace(m, samples=tuple(range(start, start + len(m.samples)))))
            start += len(m.samples)
        return RankShard(batch.select(self.rank_samples(rank)), tuple(renumbered))

    def shards(self, batch: SequenceBatch) -> list[RankShard]:
        """Every rank's part of the batch that was planned."""
        return [self.shard(batch, rank) for rank in range(len(self.ranks))]


@dataclass(frozen=True)
class RankShard:
    """What one data-parallel rank works on: its sequences and how they form micro-batches."""

    batch: SequenceBatch
    microbatches: tuple[Microbatch, ...]


def plan_microbatches(
    lengths: IntArray,
    *,
    dp: int,
    packed: bool,
    max_tokens: int | None = None,
    max_rows: int | None = None,
    divisible_by: int = 1,
    same_shape: bool = False,
    families: list[Family] | None = None,
) -> MicrobatchPlan:
    """Spreads N sequences over the micro-batches of `dp` ranks, each sequence once, tokens balanced.

    Args:
        lengths: int64 [N], tokens of each sequence, all positive.
        dp: data-parallel ranks.
        packed: several sequences in one row, else one row for each.
        max_tokens: tokens at most in a packed row, its padding included.
        max_rows: rows at most in a padded micro-batch.
        divisible_by: row lengths are multiples of this.
        same_shape: all micro-batches of all ranks get one shape, by padding: pipeline stages exchange tensors of one
            size, and some expert dispatchers need equal token counts on all ranks.
        families: packed sequences of one family stay together and hold their prompt once; None shares nothing.

    Raises:
        UserError: a sequence is longer than a packed row may be.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) == 0 or lengths.min() < 1:
        raise ValueError(f"cannot plan micro-batches of {len(lengths)} sequences with lengths {lengths[:8].tolist()}")
    if packed:
        if max_tokens is None:
            raise ValueError("packed micro-batches need max_tokens")
        budget = max_tokens // divisible_by * divisible_by
        if families is None:
            contents = [_content(b, lengths) for b in _packed_bins(lengths, dp, budget, max_tokens)]
        else:
            contents = _family_contents(families, lengths, dp, budget, max_tokens)
        shapes = [(1, _round_up(c.tokens, divisible_by)) for c in contents]
    else:
        if max_rows is None:
            raise ValueError("padded micro-batches need max_rows")
        bins = _padded_bins(lengths, dp, max_rows)
        contents = [_content(b, lengths) for b in bins]
        shapes = [(max(1, len(b)), _round_up(int(lengths[b].max(initial=0)), divisible_by)) for b in bins]
    if same_shape:
        shapes = [(max(r for r, _ in shapes), max(n for _, n in shapes))] * len(shapes)
    microbatches = [
        Microbatch(c.samples, rows, row_length, packed, c.families)
        for c, (rows, row_length) in zip(contents, shapes, strict=True)
    ]
    costs = [c.tokens for c in contents]
    return MicrobatchPlan(_deal(microbatches, costs, dp), sum(costs))


class _Content(NamedTuple):
    """What a micro-batch holds: its samples in order, how they share prompts, and the tokens to compute."""

    samples: tuple[int, ...]
    families: tuple[tuple[int, int], ...]
    tokens: int


def _content(samples: list[int], lengths: IntArray) -> _Content:
    # Longest first: sequences of one length are neighbours, which the local attention takes together.
    return _Content(tuple(sorted(samples, key=lambda i: (-lengths[i], i))), (), int(lengths[samples].sum()))


def _family_contents(
    families: list[Family], lengths: IntArray, dp: int, budget: int, max_tokens: int
) -> list[_Content]:
    """Families are packed as if each were one sequence."""
    whole = split_families(families, lengths, budget, at_least=dp)
    costs = np.array([family.num_tokens(lengths) for family in whole], dtype=np.int64)
    contents = []
    for chosen in _packed_bins(costs, dp, budget, max_tokens):
        inside = [whole[i] for i in sorted(chosen)]
        samples = tuple(i for family in inside for i in family.samples)
        shape = tuple((len(family.samples), family.prompt) for family in inside)
        contents.append(_Content(samples, shape, int(costs[chosen].sum())))
    return contents


def _round_up(count: int, multiple: int) -> int:
    """At least one multiple: an empty micro-batch still has a row of padding, as no model runs on no token."""
    return max(1, math.ceil(count / multiple)) * multiple


def _by_length(lengths: IntArray) -> list[int]:
    """Longest first; equal lengths keep their order, so that a plan is a function of the lengths."""
    return np.argsort(-lengths, kind="stable").tolist()


def _packed_bins(lengths: IntArray, dp: int, budget: int, max_tokens: int) -> list[list[int]]:
    """As few bins as first-fit-decreasing needs, rounded up to a multiple of dp, then evened out."""
    if lengths.max() > budget:
        raise UserError(
            f"a sequence has {lengths.max()} tokens, a packed micro-batch holds {budget} (of {max_tokens}, cut to a "
            "multiple of policy.make_sequence_length_divisible_by); raise policy.sequence_packing.train_mb_tokens and "
            "logprob_mb_tokens to at least policy.max_total_sequence_length"
        )
    first_fit = _first_fit_decreasing(lengths, budget)
    count = _round_up(len(first_fit), dp)
    even = _least_loaded(lengths, count, budget)
    if even is not None:
        return even
    # Evening out can fail where first-fit succeeded, when bins are nearly full; then only the missing bins are made.
    sizes = [(len(b) < 2, -int(lengths[b].sum()), i) for i, b in enumerate(first_fit)]
    heapq.heapify(sizes)
    while len(first_fit) < count:
        fullest = heapq.heappop(sizes)[-1]
        half = len(first_fit[fullest]) // 2
        first_fit.append(first_fit[fullest][:half])
        first_fit[fullest] = first_fit[fullest][half:]
        for i in (fullest, len(first_fit) - 1):
            heapq.heappush(sizes, (len(first_fit[i]) < 2, -int(lengths[first_fit[i]].sum()), i))
    return first_fit


def _first_fit_decreasing(lengths: IntArray, budget: int) -> list[list[int]]:
    """Each sequence, longest first, goes into the first bin that has room (Johnson 1973)."""
    room = np.empty(len(lengths), dtype=np.int64)
    bins: list[list[int]] = []
    for i in _by_length(lengths):
        fits = np.flatnonzero(room[: len(bins)] >= lengths[i])
        if len(fits) == 0:
            room[len(bins)] = budget
            bins.append([])
        b = int(fits[0]) if len(fits) else len(bins) - 1
        bins[b].append(i)
        room[b] -= lengths[i]
    return bins


def _least_loaded(lengths: IntArray, count: int, budget: int) -> list[list[int]] | None:
    """Each sequence, longest first, goes into the emptiest of `count` bins; None when one has no room there."""
    load = np.zeros(count, dtype=np.int64)
    bins: list[list[int]] = [[] for _ in range(count)]
    for i in _by_length(lengths):
        b = int(load.argmin())
        if load[b] + lengths[i] > budget:
            return None
        bins[b].append(i)
        load[b] += lengths[i]
    return bins


def _padded_bins(lengths: IntArray, dp: int, max_rows: int) -> list[list[int]]:
    """Sequences of similar length share a micro-batch, so that little padding is needed."""
    count = _round_up(math.ceil(len(lengths) / max_rows), dp)
    return [part.tolist() for part in np.array_split(np.array(_by_length(lengths)), count)]


def _deal(microbatches: list[Microbatch], tokens: list[int], dp: int) -> tuple[tuple[Microbatch, ...], ...]:
    """Largest first, one to each rank in turn, the larger of a turn to the rank that has fewest tokens so far.

    Ranks then hold like amounts in all and, because they run in step, also micro-batch by micro-batch.
    """
    size = {id(m): count for m, count in zip(microbatches, tokens, strict=True)}
    ordered = sorted(microbatches, key=lambda m: -size[id(m)])
    ranks: list[list[Microbatch]] = [[] for _ in range(dp)]
    load = [0] * dp
    for start in range(0, len(ordered), dp):
        emptiest_first = sorted(range(dp), key=lambda r: load[r])
        for rank, m in zip(emptiest_first, ordered[start : start + dp], strict=True):
            ranks[rank].append(m)
            load[rank] += size[id(m)]
    return tuple(tuple(rank) for rank in ranks)
