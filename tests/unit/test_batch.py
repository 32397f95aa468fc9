"""Risk guarded: a sample's tokens end up with another sample's log-probabilities."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_moe.batch import ROUTED_EXPERTS, SequenceBatch


def make_batch(lengths: list[int]) -> SequenceBatch:
    """Every token is a number of its own."""
    total, count = sum(lengths), len(lengths)
    tokens = np.arange(total, dtype=np.int32)
    return SequenceBatch(
        np.array(lengths, dtype=np.int64),
        tokens,
        tokens % 3 == 0,
        {"advantages": tokens / 7, ROUTED_EXPERTS: np.arange(total * 4, dtype=np.int16).reshape(total, 2, 2)},
        {"rewards": np.arange(count, dtype=np.float32)},
    )


@given(st.data(), st.lists(st.integers(1, 5), min_size=1, max_size=8))
def test_selected_samples_keep_their_own_tokens_and_values_in_any_order_and_number(
    data: st.DataObject, lengths: list[int]
) -> None:
    batch = make_batch(lengths)
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=10))
    index = [t for row in rows for t in range(sum(lengths[:row]), sum(lengths[: row + 1]))]
    found = batch.select(rows)
    assert batch.token_index(rows).tolist() == found.tokens.tolist() == index
    assert found.lengths.tolist() == [lengths[row] for row in rows]
    assert found.token_mask.tolist() == [t % 3 == 0 for t in index]
    assert found.token_values["advantages"].tolist() == [t / 7 for t in index]
    assert np.array_equal(found.token_values[ROUTED_EXPERTS], batch.token_values[ROUTED_EXPERTS][index])
    assert found.sample_values["rewards"].tolist() == rows


def test_samples_that_follow_one_another_are_one_stretch_and_not_copied() -> None:
    batch = make_batch([2, 3, 4, 1])
    assert batch.token_spans([1, 2, 0, 3]) == [(2, 9), (0, 2), (9, 10)]
    assert np.shares_memory(batch.select([1, 2]).tokens, batch.tokens)
    assert not np.shares_memory(batch.select([2, 1]).tokens, batch.tokens)
