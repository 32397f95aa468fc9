"""Virtual time against times worked out by hand. Risk: a placement chosen on wrong numbers, or a bound not kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_moe.bench.placement.engine import Fleet
from nemo_rl_moe.bench.placement.simulate import Steps, simulate_async, simulate_sync
from nemo_rl_moe.bench.placement.workload import GenerationSpeed
from tests.unit.bench.placement_cases import BATCH, workload

STEPS = Steps(count=10)


def test_a_sync_step_is_generation_10_s_training_20_s_and_refit_3_s():
    # 8 requests x 100 tokens over 4 devices at 20 tokens/s; 800 tokens over 4 devices at 10 tokens/s.
    out = simulate_sync(workload(), BATCH, STEPS)
    assert out.step_s == pytest.approx(10 + 20 + 3)
    assert (out.exposed_generation_s, out.training_s, out.refit_s) == pytest.approx((10, 20, 3))
    assert out.policy_idle == pytest.approx(0) and out.generation_idle == pytest.approx(0)
    assert out.tokens_per_sec_per_gpu == pytest.approx(800 / 33 / 4)
    assert (out.age_mean, out.age_max) == (0, 0)


def test_scoring_2_s_and_other_work_3_s_leave_sync_devices_idle_5_of_40_s():
    speed = [{"devices": 4, "tokens_per_second_per_device": 100.0}]
    out = simulate_sync(workload(reward_s=2.0, other_s=3.0, logprobs=speed), BATCH, STEPS)
    assert out.step_s == pytest.approx(10 + 2 + 2 + 20 + 3 + 3)
    assert out.policy_idle == pytest.approx(5 / 40)


def test_a_decode_step_takes_latency_0_5_s_and_0_05_s_for_each_of_two_requests():
    speed = {"decode_latency_s": 0.5, "peak_tokens_per_second": 20.0}
    assert simulate_sync(workload(generation=speed), BATCH, STEPS).exposed_generation_s == pytest.approx(100 * 0.6)


def test_an_engine_of_two_devices_spreads_its_four_requests_over_them():
    speed = {"decode_latency_s": 0.5, "peak_tokens_per_second": 20.0}
    out = simulate_sync(workload(generation=speed), replace(BATCH, engine_size=2), STEPS)
    assert out.exposed_generation_s == pytest.approx(100 * 0.6)
    assert out.requests_per_device == pytest.approx(2)


def test_with_one_request_at_a_time_the_second_waits_and_latency_counts_twice():
    speed = {"decode_latency_s": 0.5, "peak_tokens_per_second": 20.0, "max_requests": 1}
    out = simulate_sync(workload(generation=speed), BATCH, STEPS)
    assert out.exposed_generation_s == pytest.approx(2 * 100 * 0.55)


def test_a_short_response_frees_its_share_for_the_long_one():
    # Together for 10 tokens each at 0.1 s a step, then 90 more at 0.05 s.
    fleet = Fleet(GenerationSpeed(decode_latency_s=0.0, peak_tokens_per_second=20.0), num_engines=1, engine_size=1)
    fleet.submit([(10.0, 0), (100.0, 1)], 0.0)
    assert fleet.end() == (pytest.approx(1.0), 0)
    fleet.pause(2.0, 5.0)
    assert fleet.end() == (pytest.approx(1.0 + 4.5 + 5.0), 1)
    assert fleet.busy_s == pytest.approx(5.5)


@pytest.mark.parametrize("in_flight", [True, False])
@pytest.mark.parametrize(("policy", "training", "generation"), [(1, 80, 800 / 60), (2, 40, 20), (3, 80 / 3, 40)])
def test_an_async_step_is_the_slower_side_and_the_refit(policy, training, generation, in_flight):
    out = simulate_async(workload(), replace(BATCH, in_flight_updates=in_flight), policy, STEPS)
    assert out.step_s == pytest.approx(max(training, generation) + 1)
    assert out.exposed_generation_s == pytest.approx(max(0, generation - training))
    assert out.policy_idle == pytest.approx(1 - (training + 1) / out.step_s)
    assert out.generation_idle == pytest.approx(1 - (generation + 1) / out.step_s)
    assert (out.age_mean, out.age_max) == (1, 1)


def test_balanced_sides_idle_no_time_and_beat_sync_by_the_work_that_overlaps():
    fast = [{"devices": 4, "tokens_per_second_per_device": 20.0}]
    sync, split = (
        simulate_sync(workload(training=fast), BATCH, STEPS),
        simulate_async(workload(training=fast), BATCH, 2),
    )
    assert (sync.step_s, split.step_s) == (pytest.approx(10 + 10 + 3), pytest.approx(20 + 1))
    assert (split.policy_idle, split.generation_idle) == (pytest.approx(0), pytest.approx(0))


def test_age_0_takes_turns_on_split_devices():
    out = simulate_async(workload(), replace(BATCH, max_age=0), 2, STEPS)
    assert out.step_s == pytest.approx(20 + 40 + 1)
    assert out.age_max == 0
    assert out.policy_idle == pytest.approx(20 / 61) and out.generation_idle == pytest.approx(40 / 61)


def test_latency_bound_generation_hides_half_of_itself_at_age_1():
    # Every batch takes 100 s alone or with another. Two overlap: a pair of steps takes one generation, two refits, and
    # the training of the first, before the second of the pair can start its own.
    speed = {"decode_latency_s": 1.0, "peak_tokens_per_second": 1e12}
    out = simulate_async(workload(generation=speed), BATCH, 2, STEPS)
    assert out.step_s == pytest.approx((100 + 40 + 2 * 1) / 2)


def test_the_same_lengths_are_drawn_for_every_placement_and_seeds_differ():
    random = workload(response_tokens={"distribution": "lognormal", "mean": 100.0, "sigma": 1.0})
    sync = simulate_sync(random, BATCH, Steps(count=3, warmup=0))
    split = simulate_async(random, replace(BATCH, max_age=0), 2, Steps(count=3, warmup=0))
    assert split.training_s == pytest.approx(2 * sync.training_s)
    assert simulate_sync(random, BATCH, Steps(count=3, warmup=0, seed=1)).step_s != sync.step_s


@settings(max_examples=60, deadline=None)
@given(
    max_age=st.integers(0, 4),
    prompts=st.integers(1, 5),
    group_size=st.integers(1, 4),
    policy=st.integers(1, 3),
    in_flight=st.booleans(),
    latency=st.floats(0, 1),
    limit=st.one_of(st.none(), st.integers(1, 3)),
    speed=st.floats(1, 1000),
    reward_s=st.floats(0, 50),
    other_s=st.floats(0, 50),
    seed=st.integers(0, 100),
)
def test_age_never_passes_the_bound_and_the_times_add_up(
    max_age, prompts, group_size, policy, in_flight, latency, limit, speed, reward_s, other_s, seed
):
    random = workload(
        response_tokens={"distribution": "lognormal", "mean": 60.0, "sigma": 1.5},
        generation={"decode_latency_s": latency, "peak_tokens_per_second": 20.0, "max_requests": limit},
        training=[{"devices": 2, "tokens_per_second_per_device": speed}],
        reward_s=reward_s,
        other_s=other_s,
    )
    batch = replace(
        BATCH,
        prompts=prompts,
        group_size=group_size,
        max_age=max_age,
        in_flight_updates=in_flight,
        response_limit=500.0,
    )
    out = simulate_async(random, batch, policy, Steps(count=8, warmup=0, seed=seed))
    assert 0 <= out.age_mean <= out.age_max <= max_age
    parts = (out.exposed_generation_s, out.logprob_s, out.training_s, out.refit_s, out.other_s)
    assert out.step_s == pytest.approx(sum(parts))
    assert 0 <= out.policy_idle <= 1 and 0 <= out.generation_idle <= 1
