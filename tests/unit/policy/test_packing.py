"""Guards against a sample lost or trained twice, a bin over budget, and ranks with unequal micro-batch counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_moe.batch import SequenceBatch
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.policy.megatron.microbatch import build_rows
from nemo_rl_moe.policy.megatron.schedule import sequence_ends
from nemo_rl_moe.policy.packing import MicrobatchPlan, plan_microbatches

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=60).map(lambda x: np.array(x, dtype=np.int64))


def _plan(lengths: np.ndarray, packed: bool, dp: int, divisible_by: int = 1, same_shape: bool = False):
    return plan_microbatches(
        lengths,
        dp=dp,
        packed=packed,
        max_tokens=96,
        max_rows=3,
        divisible_by=divisible_by,
        same_shape=same_shape,
    )


def _microbatches(plan: MicrobatchPlan):
    return [m for rank in plan.ranks for m in rank]


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.booleans(), st.integers(1, 5), st.sampled_from([1, 4, 8]), st.booleans())
def test_each_sample_is_planned_once_within_budget_on_ranks_with_equal_counts(lengths, packed, dp, multiple, same):
    plan = _plan(lengths, packed, dp, multiple, same)
    assert sorted(i for m in _microbatches(plan) for i in m.samples) == list(range(len(lengths)))
    assert {len(rank) for rank in plan.ranks} == {plan.num_microbatches}
    for m in _microbatches(plan):
        own = lengths[list(m.samples)]
        assert m.row_length % multiple == 0
        if packed:
            assert m.rows == 1 and own.sum() <= m.row_length <= 96
        else:
            assert len(own) <= m.rows <= 3 and own.max(initial=0) <= m.row_length
    if same:
        assert len({(m.rows, m.row_length) for m in _microbatches(plan)}) == 1


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.booleans(), st.integers(1, 3))
def test_unpacking_what_was_packed_gives_every_token_back(lengths, packed, dp):
    tokens = np.arange(1, lengths.sum() + 1, dtype=np.int32)
    batch = SequenceBatch(lengths, tokens, np.ones(len(tokens), dtype=bool))
    plan = _plan(lengths, packed, dp, divisible_by=4)
    seen = np.zeros(len(tokens), dtype=np.int32)
    for rank in range(dp):
        shard = plan.shard(batch, rank)
        origin = batch.token_index(plan.rank_samples(rank))
        for m in shard.microbatches:
            rows = build_rows(shard.batch, m, np.ones(len(shard.batch.tokens), dtype=bool), "cpu")
            index = origin[rows.token_index.numpy()]
            assert (rows.tokens.reshape(-1)[rows.sources + 1] == rows.targets).all()
            seen[index] += rows.targets.numpy()
            assert (rows.position_ids.reshape(-1)[rows.sources + 1] > 0).all()
    firsts = batch.offsets[:-1]
    assert (seen[firsts] == 0).all()
    expected = tokens.copy()
    expected[firsts] = 0
    assert (seen == expected).all()


def test_eight_full_halves_fill_four_rows_of_one_budget():
    plan = plan_microbatches(np.full(8, 50), dp=2, packed=True, max_tokens=100)
    assert plan.num_microbatches == 2
    assert plan.num_slots == plan.num_tokens == 400


def test_517_and_502_tokens_with_multiple_128_are_both_padded_to_640():
    plan = plan_microbatches(np.array([517, 502]), dp=2, packed=True, max_tokens=640, divisible_by=128, same_shape=True)
    assert [rank[0].row_length for rank in plan.ranks] == [640, 640]
    assert (plan.num_tokens, plan.num_slots) == (1019, 1280)


def test_a_rank_without_samples_gets_an_empty_microbatch_of_one_row():
    plan = plan_microbatches(np.array([5]), dp=3, packed=True, max_tokens=8, divisible_by=4)
    assert sorted((len(rank[0].samples), rank[0].row_length) for rank in plan.ranks) == [(0, 4), (0, 4), (1, 8)]


def test_ranks_of_a_skewed_batch_differ_by_less_than_a_tenth_in_tokens():
    lengths = np.random.default_rng(0).integers(8, 257, 512)
    plan = plan_microbatches(lengths, dp=4, packed=True, max_tokens=1024)
    loads = [lengths[plan.rank_samples(rank)].sum() for rank in range(4)]
    assert max(loads) < 1.1 * min(loads)
    assert plan.num_microbatches * 4 * 1024 < 1.1 * lengths.sum() + 4 * 1024


def test_a_sequence_longer_than_the_budget_is_refused_with_both_numbers():
    with pytest.raises(UserError, match=r"a sequence has 101 tokens, a packed micro-batch holds 96 \(of 100"):
        plan_microbatches(np.array([3, 101]), dp=1, packed=True, max_tokens=100, divisible_by=8)


def test_3_and_2_packed_tokens_and_a_pad_that_lengthens_the_last_are_bounded_at_0_3_6_with_positions_from_0_in_each():
    batch = SequenceBatch(np.array([3, 2]), np.arange(5, dtype=np.int32), np.ones(5, dtype=bool))
    plan = plan_microbatches(batch.lengths, dp=1, packed=True, max_tokens=8, divisible_by=6)
    rows = build_rows(batch, plan.ranks[0][0], np.ones(5, dtype=bool), "cpu")
    assert sequence_ends(rows) == [0, 3, 6]
    assert rows.position_ids.tolist() == [[0, 1, 2, 0, 1, 0]]
    assert rows.sources.tolist() == [0, 1, 3]
    assert rows.targets.tolist() == rows.token_index.tolist() == [1, 2, 4]
