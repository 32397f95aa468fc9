"""Risk guarded: a baseline over the wrong samples, or an advantage that is not finite, ruins a run without an error."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_moe.grpo.advantages import clip_advantages, group_advantages
from tests.unit.grpo import reference

MODES = list(itertools.product([True, False], [True, False]))


def ours(
    rewards: list[float], groups: list[int], leave_one_out: bool, normalize: bool, valid: list[float] | None = None
) -> list[float]:
    kept = None if valid is None else torch.tensor(valid)
    return group_advantages(
        torch.tensor(rewards, dtype=torch.float32),
        torch.tensor(groups),
        leave_one_out=leave_one_out,
        normalize=normalize,
        valid=kept,
    ).tolist()


@pytest.mark.parametrize(("leave_one_out", "normalize"), MODES)
def test_advantages_equal_a_float64_loop_to_1e_6_for_20_draws_of_ragged_groups(leave_one_out, normalize):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        groups = rng.integers(0, 6, 40)
        rewards = rng.choice([0.0, 0.25, 1.0, 1.7], 40).astype(np.float32)
        valid = (rng.random(40) > 0.2).astype(float)
        expected = reference.advantages(rewards.tolist(), groups.tolist(), leave_one_out, normalize, valid.tolist())
        found = ours(rewards.tolist(), groups.tolist(), leave_one_out, normalize, valid.tolist())
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_one_success_in_four_has_leave_one_out_advantages_1_and_minus_a_third():
    assert ours([1, 0, 0, 0], [0] * 4, True, False) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])


def test_one_success_in_four_normalised_leaves_the_success_undivided_and_divides_the_rest_by_their_own_0_577():
    # The success's three others are all 0: no deviation. Each failure's others are [1, 0, 0], whose unbiased std is
    # sqrt(1/3), so that (0 - 1/3) / sqrt(1/3) = -0.5774.
    expected = [1.0, *[-(1 / 3) / (math.sqrt(1 / 3) + 1e-6)] * 3]
    assert ours([1, 0, 0, 0], [0] * 4, True, True) == pytest.approx(expected)


def test_one_success_in_four_over_the_whole_group_is_0_75_over_0_5():
    assert ours([1, 0, 0, 0], [0] * 4, False, True) == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)


@pytest.mark.parametrize(("leave_one_out", "normalize"), MODES)
def test_groups_1_0_and_5_4_are_plus_minus_within_each_group_not_across(leave_one_out, normalize):
    a = ours([1, 0, 5, 4], [0, 0, 1, 1], leave_one_out, normalize)
    assert a[0] == pytest.approx(-a[1])
    assert a[:2] == pytest.approx(a[2:])
    assert a[0] > 0.4


@pytest.mark.parametrize(("leave_one_out", "normalize"), MODES)
def test_a_group_of_1_has_advantage_0(leave_one_out, normalize):
    assert ours([0.7, 3.0, 1.0], [4, 7, 7], leave_one_out, normalize)[0] == 0.0
    assert ours([0.7], [0], leave_one_out, normalize) == [0.0]


@pytest.mark.parametrize(("leave_one_out", "normalize"), MODES)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, -3e38, 1e-45, 16777217.0])
def test_equal_rewards_have_advantage_exactly_0(reward, leave_one_out, normalize):
    assert ours([reward] * 7, [0] * 7, leave_one_out, normalize) == [0.0] * 7


@pytest.mark.parametrize(("leave_one_out", "normalize"), MODES)
def test_an_offset_of_2_to_the_20_changes_no_advantage(leave_one_out, normalize):
    rewards = [0.0, 1.0, 0.5, 0.25]
    shifted = [r + 2.0**20 for r in rewards]
    assert ours(shifted, [0] * 4, leave_one_out, normalize) == ours(rewards, [0] * 4, leave_one_out, normalize)


def test_rewards_100000000_and_100000008_have_advantages_minus_8_and_8():
    assert ours([1e8, 1e8 + 8], [0, 0], True, True) == [-8.0, 8.0]


def test_others_that_differ_by_one_float32_rounding_do_not_blow_an_advantage_up():
    # Dividing 0.1 by the others' std of 4e-9 plus 1e-6 would give -100000.
    other = float(np.nextafter(np.float32(0.1), np.float32(1)))
    assert ours([0.0, 0.1, other, 0.1], [0] * 4, True, True)[0] == pytest.approx(-0.1, rel=1e-6)


def test_rewards_of_plus_and_minus_3e38_have_the_largest_float32_as_advantage_and_not_infinity():
    largest = torch.finfo(torch.float32).max
    assert ours([3e38, -3e38], [0, 0], True, False) == [largest, -largest]


def test_three_small_rewards_next_to_1e5_keep_their_deviation_of_1():
    # The large sample's baseline is the mean of [1, 2, 3] and its std is 1; float32 sums of squares would lose both.
    assert ours([1e5, 1.0, 2.0, 3.0], [0] * 4, True, False)[0] == pytest.approx(1e5 - 2)
    assert ours([1e5, 1.0, 2.0, 3.0], [0] * 4, True, True)[0] == pytest.approx((1e5 - 2) / (1 + 1e-6))


def test_the_same_prompt_drawn_twice_is_2_groups_by_its_occurrence_number():
    twice = ours([1, 0, 1, 1], [0, 0, 1, 1], True, False)
    assert twice == [1.0, -1.0, 0.0, 0.0]
    assert ours([1, 0, 1, 1], [0, 0, 0, 0], True, False) != twice


def test_samples_of_a_group_need_not_be_adjacent():
    assert ours([1, 5, 0, 4], [9, 2, 9, 2], True, False) == [1.0, 1.0, -1.0, -1.0]


def test_an_invalid_sample_has_advantage_0_and_does_not_enter_the_baseline():
    assert ours([1, 0, 100], [0, 0, 0], True, False, [1, 1, 0]) == [1.0, -1.0, 0.0]


def test_a_single_valid_sample_of_4_has_advantage_0_and_an_invalid_nan_is_ignored():
    assert ours([1, 0, float("nan"), 0], [0] * 4, True, True, [1, 0, 0, 0]) == [0.0] * 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_an_error_naming_sample_2(bad):
    with pytest.raises(ValueError, match="reward of sample 2"):
        ours([0, 1, bad], [0, 0, 0], True, True)


def test_shapes_that_differ_are_an_error():
    with pytest.raises(ValueError, match="expected"):
        ours([0, 1, 2], [0, 0], True, True)


def test_no_samples_give_no_advantages():
    assert ours([], [], True, True) == []


finite_float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
near_each_other = st.sampled_from([0.1, 0.10000000149011612, 0.10000000894069672, 1.0, 1.0000001192092896, 0.0])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(finite_float32, near_each_other), min_size=1, max_size=12), st.data())
def test_advantages_are_finite_for_every_float32_reward_vector(rewards, data):
    groups = data.draw(st.lists(st.integers(0, 2), min_size=len(rewards), max_size=len(rewards)))
    for leave_one_out, normalize in MODES:
        found = ours(rewards, groups, leave_one_out, normalize)
        assert all(math.isfinite(a) for a in found)
        if normalize and not leave_one_out:
            assert max(map(abs, found)) <= len(rewards)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=2, max_size=10), st.randoms(use_true_random=False))
def test_reordering_samples_reorders_advantages_and_changes_none_by_more_than_1e_6(rewards, random):
    groups = [i % 2 for i in range(len(rewards))]
    order = list(range(len(rewards)))
    random.shuffle(order)
    for leave_one_out, normalize in MODES:
        straight = ours(rewards, groups, leave_one_out, normalize)
        shuffled = ours([rewards[i] for i in order], [groups[i] for i in order], leave_one_out, normalize)
        assert shuffled == pytest.approx([straight[i] for i in order], abs=1e-6)


def test_clip_advantages_to_minus_1_and_2_leaves_the_rest():
    a = torch.tensor([-3.0, -0.5, 1.5, 4.0])
    assert clip_advantages(a, -1.0, 2.0).tolist() == [-1.0, -0.5, 1.5, 2.0]
    assert clip_advantages(a, None, 2.0).tolist() == [-3.0, -0.5, 1.5, 2.0]
    assert clip_advantages(a, None, None) is a
