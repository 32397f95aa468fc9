"""The gate must speak when the median leaves the bound, once, and not about a single stray step."""

from __future__ import annotations

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
