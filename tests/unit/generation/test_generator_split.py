"""How prompts are split over engines, and which draws repeated prompts get."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_moe.data.prompt import Prompt
from nemo_rl_moe.generation.generator import first_samples, split_bounds

LENGTHS = st.lists(st.integers(1, 500), max_size=40)


def test_prompts_of_100_10_10_80_tokens_split_in_two_after_the_first() -> None:
    assert split_bounds(np.array([100, 10, 10, 80]), 2) == [0, 1, 4]


@given(LENGTHS, st.integers(1, 9))
def test_parts_are_contiguous_cover_all_and_are_off_by_one_prompt_at_most(lengths: list[int], parts: int) -> None:
    bounds = split_bounds(np.array(lengths, dtype=np.int64), parts)
    assert len(bounds) == parts + 1
    assert bounds[0] == 0
    assert bounds[-1] == len(lengths)
    assert bounds == sorted(bounds)
    fair = sum(lengths) / parts
    for start, stop in itertools.pairwise(bounds):
        assert sum(lengths[start:stop]) <= fair + max(lengths, default=0)


def test_third_time_the_same_prompt_starts_at_response_8_of_4_each() -> None:
    prompts = [Prompt(id=row, token_ids=[1], text="", env_name="math") for row in (7, 3, 7, 7, 3)]
    assert first_samples(prompts, 4).tolist() == [0, 0, 4, 8, 4]
