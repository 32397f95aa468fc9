"""Risk guarded: a text is scored for another response's tokens."""

from __future__ import annotations

import numpy as np

from nemo_rl_moe.generation.interface import Completions


def test_six_responses_split_by_two_and_joined_again_are_the_same() -> None:
    lengths = np.array([1, 3, 2, 2, 4, 1], dtype=np.int64)
    total = int(lengths.sum())
    whole = Completions(
        lengths,
        np.arange(total, dtype=np.int32),
        np.arange(total, dtype=np.float32) / 7,
        np.arange(6) % 2 == 0,
        np.repeat(np.arange(6, dtype=np.int32), lengths),
        [f"text {i}" for i in range(6)],
    )
    parts = whole.split(2)
    assert [part.texts for part in parts] == [["text 0", "text 1"], ["text 2", "text 3"], ["text 4", "text 5"]]
    assert [part.weight_versions.tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert [part.token_ids.tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11, 12]]
    joined = Completions.concat(parts)
    assert joined.texts == whole.texts
    for name in ("lengths", "token_ids", "logprobs", "truncated", "token_versions"):
        assert np.array_equal(getattr(joined, name), getattr(whole, name))
