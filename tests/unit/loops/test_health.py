"""The gate must speak when the median leaves the bound, once, and not about a single stray step."""

from __future__ import annotations

import math

from nemo_rl_moe.loops.health import HealthGate


def test_40_steps_without_a_gradient_are_told_once() -> None:
    gate = HealthGate(limit=1.1)
    assert gate.no_gradient(None) is None
    told = [gate.no_gradient("no gradient from rewards") for _ in range(40)]
    assert told[0] is not None and told[0].startswith("no gradient from rewards; train/zero_std_fraction")
    assert told[1:] == [None] * 39


def test_a_single_step_at_5_among_steps_at_1_is_no_alarm() -> None:
    gate = HealthGate(1.1)
    assert [gate.observe(v) for v in (1.0, 1.0, 5.0, 1.0)] == [None] * 4


def test_a_median_above_1_1_is_told_once_and_again_after_it_was_well() -> None:
    gate = HealthGate(1.1)
    told = [gate.observe(v) is not None for v in [1.2, 1.3, *[1.0] * 10, *[2.0] * 12]]
    assert [i for i, said in enumerate(told) if said] == [0, 20]


def test_the_bound_of_1_1_itself_is_well_and_the_next_number_is_not() -> None:
    for value, warns in ((1.1, False), (math.nextafter(1.1, 2), True)):
        gate = HealthGate(1.1)
        assert [gate.observe(v) is not None for v in (1.0, value, value)][-1] is warns


def test_the_median_of_two_steps_at_1_0_and_1_3_is_their_mean_of_1_15() -> None:
    gate = HealthGate(1.1)
    assert gate.observe(1.0) is None
    told = gate.observe(1.3)
    assert told is not None and "over the last 2 step(s) is 1.150" in told


def test_only_the_last_20_steps_count() -> None:
    gate = HealthGate(1.1)
    assert [gate.observe(1.0) for _ in range(100)] == [None] * 100
    # 11 of 20 make the median; 11 of 111 would not.
    assert [gate.observe(1.5) is not None for _ in range(11)] == [False] * 9 + [True, False]
