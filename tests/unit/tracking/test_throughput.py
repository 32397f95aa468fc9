"""Rates divide by the devices that did the work."""

from __future__ import annotations

import pytest

from nemo_rl_moe.tracking.throughput import throughput

TIMING = {
    "timing/train/total_step_time": 20.0,
    "timing/train/generation": 10.0,
    "timing/train/policy_and_reference_logprobs": 2.0,
    "timing/train/policy_training": 5.0,
}


def test_48000_tokens_on_6_training_and_2_generation_devices_give_these_five_rates() -> None:
    assert throughput(48_000, TIMING, 6, 2, 8, train_flops=6e12) == {
        "performance/total_num_tokens": 48_000.0,
        "performance/tokens_per_sec_per_gpu": 300.0,  # 48000 / 20 / 8
        "performance/policy_training_tokens_per_sec_per_gpu": 1600.0,  # 48000 / 5 / 6
        "performance/policy_and_reference_logprobs_tokens_per_sec_per_gpu": 4000.0,  # 48000 / 2 / 6
        "performance/generation_tokens_per_sec_per_gpu": 2400.0,  # 48000 / 10 / 2
        "performance/train_flops_per_gpu": 2e11,  # 6e12 / 5 / 6
    }


def test_colocated_on_4_devices_every_rate_divides_by_4() -> None:
    rates = throughput(48_000, TIMING, 4, 4, 4)
    assert rates["performance/tokens_per_sec_per_gpu"] == 600.0
    assert rates["performance/policy_training_tokens_per_sec_per_gpu"] == 2400.0
    assert rates["performance/generation_tokens_per_sec_per_gpu"] == 1200.0


def test_a_phase_that_did_not_run_has_rate_0_and_unknown_flops_are_left_out() -> None:
    rates = throughput(100, {"timing/train/total_step_time": 1.0}, 1, 1, 1)
    assert rates["performance/policy_and_reference_logprobs_tokens_per_sec_per_gpu"] == 0.0
    assert "performance/train_flops_per_gpu" not in rates


def test_0_generation_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="devices must be positive, got 1, 0, 1"):
        throughput(1, TIMING, 1, 0, 1)
