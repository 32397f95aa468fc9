"""Risk guarded: groups that are split, rewards that move for the wrong responses, a step that never fills."""

from __future__ import annotations

import pytest
import torch

from nemo_rl_moe.grpo.advantages import group_advantages
from nemo_rl_moe.grpo.rewards import overlong_penalty, scale_rewards
from nemo_rl_moe.grpo.sampling import (
    DynamicSampler,
    DynamicSamplingExhausted,
    overlong_mask,
    uneven_groups,
    why_no_gradient,
    zero_std_fraction,
)

FOUR_GROUPS = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]], dtype=torch.float32).ravel()
FOUR_IDS = torch.arange(4).repeat_interleave(4)


def test_penalty_with_limit_20_and_buffer_8_is_0_at_12_minus_half_at_16_minus_1_at_20_and_25():
    found = overlong_penalty(torch.tensor([1, 12, 14, 16, 20, 25]), 20, 8)
    assert found.tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


def test_penalty_scales_with_its_weight_of_0_5():
    assert overlong_penalty(torch.tensor([16, 20]), 20, 8, 0.5).tolist() == [-0.25, -0.5]


@pytest.mark.parametrize("buffer", [0, 21])
def test_a_buffer_of_0_or_above_the_limit_is_an_error(buffer):
    with pytest.raises(ValueError, match=f"buffer_length {buffer}"):
        overlong_penalty(torch.tensor([1]), 20, buffer)


def test_scaling_0_to_1_onto_minus_1_to_3_clamps_first():
    found = scale_rewards(torch.tensor([-5.0, 0.0, 0.25, 1.0, 7.0]), 0.0, 1.0, -1.0, 3.0)
    assert found.tolist() == [-1.0, -1.0, 0.0, 3.0, 3.0]
    assert found.dtype == torch.float32


def test_an_empty_source_range_is_an_error():
    with pytest.raises(ValueError, match=r"source_min 1\.0"):
        scale_rewards(torch.zeros(1), 1.0, 1.0, 0.0, 1.0)


def test_three_uneven_groups_stay_whole_and_the_group_of_four_ones_goes_whole():
    assert uneven_groups(FOUR_GROUPS, FOUR_IDS).tolist() == [True] * 12 + [False] * 4
    assert zero_std_fraction(FOUR_GROUPS, FOUR_IDS) == 0.25


def test_interleaved_groups_are_told_apart_by_id():
    rewards, ids = torch.tensor([1.0, 0.5, 0.0, 0.5]), torch.tensor([8, 3, 8, 3])
    assert uneven_groups(rewards, ids).tolist() == [True, False, True, False]


def test_a_difference_in_an_invalid_sample_does_not_make_a_group_uneven():
    rewards, ids = torch.tensor([1.0, 1.0, 0.0]), torch.zeros(3, dtype=torch.int64)
    assert uneven_groups(rewards, ids, torch.tensor([1, 1, 0])).tolist() == [False] * 3
    assert uneven_groups(rewards, ids, torch.tensor([0, 0, 0])).tolist() == [False] * 3


def test_kept_groups_of_four_have_an_advantage_for_each_of_their_12_samples():
    rows = DynamicSampler(3, 1).add(FOUR_GROUPS, FOUR_IDS)
    assert rows.tolist() == list(range(12))
    found = group_advantages(FOUR_GROUPS[rows], FOUR_IDS[rows], leave_one_out=True, normalize=True)
    assert (found != 0).all()


def test_sampler_fills_3_groups_over_2_batches_drops_the_surplus_and_counts():
    sampler = DynamicSampler(target_groups=3, max_batches=4)
    rewards = torch.tensor([1.0, 0, 1, 1, 0, 0])
    ids = torch.tensor([0, 0, 1, 1, 2, 2])
    assert sampler.add(rewards, ids).tolist() == [0, 1]
    assert not sampler.done
    assert sampler.add(FOUR_GROUPS, FOUR_IDS).tolist() == list(range(8))
    assert sampler.done
    assert sampler.metrics() == {
        "dynamic_sampling_batches": 2.0,
        "dynamic_sampling_groups": 7.0,
        "dynamic_sampling_equal_groups": 3.0,
        "dynamic_sampling_surplus_groups": 1.0,
    }


def test_all_equal_groups_stop_after_3_batches_with_counts_0_of_2_and_12():
    sampler = DynamicSampler(target_groups=2, max_batches=3)
    equal = torch.ones(16)
    assert sampler.add(equal, FOUR_IDS).numel() == 0
    assert sampler.add(equal, FOUR_IDS).numel() == 0
    with pytest.raises(
        DynamicSamplingExhausted, match=r"0 of 2 groups .* 3 generation batches \(12 groups sampled, 12"
    ):
        sampler.add(equal, FOUR_IDS)


def test_the_last_allowed_batch_may_still_fill_the_step():
    sampler = DynamicSampler(target_groups=3, max_batches=1)
    sampler.add(FOUR_GROUPS, FOUR_IDS)
    assert sampler.done


def test_an_empty_batch_counts_as_a_batch_without_groups():
    sampler = DynamicSampler(target_groups=1, max_batches=2)
    none = torch.zeros(0)
    assert sampler.add(none, none.long()).numel() == 0
    assert (sampler.batches, sampler.sampled) == (1, 0)
    assert zero_std_fraction(none, none.long()) == 0.0


def test_overlong_filtering_masks_the_2_cut_responses():
    assert overlong_mask(torch.tensor([True, False, True])).tolist() == [0.0, 1.0, 0.0]


def test_all_4_responses_cut_and_filtered_give_a_warning_with_4_of_4():
    cut = torch.ones(4, dtype=torch.bool)
    warning = why_no_gradient(torch.zeros(4), overlong_mask(cut), cut)
    assert warning == "no gradient: all 4 samples are masked (4 of 4 responses were cut at the length limit)"


def test_all_4_responses_cut_with_reward_0_warn_that_no_gradient_exists_even_without_filtering():
    cut = torch.ones(4, dtype=torch.bool)
    advantages = group_advantages(torch.zeros(4), torch.zeros(4).long(), leave_one_out=True, normalize=True)
    warning = why_no_gradient(advantages, torch.ones(4), cut)
    assert warning is not None
    assert "every advantage is 0" in warning
    assert "4 of 4 responses were cut" in warning


def test_one_nonzero_advantage_among_used_samples_gives_no_warning():
    uncut = torch.zeros(3, dtype=torch.bool)
    assert why_no_gradient(torch.tensor([0.0, 0.5, 0.0]), torch.ones(3), uncut) is None
    assert why_no_gradient(torch.tensor([0.0, 0.5, 0.0]), torch.tensor([1.0, 0.0, 1.0]), uncut) is not None
