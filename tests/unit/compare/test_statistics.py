"""Intervals hold the truth as often as they say; textbook values for shares."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_rl_moe.compare.statistics import Bootstrap, Interval, newcombe, student_t, wilson


def ratio(means: np.ndarray) -> np.ndarray:
    return (means[..., 1] / means[..., 0] - 1) * 100


def coverage(correlation: float, repeats: int = 300, steps: int = 19) -> float:
    """Share of intervals that hold the true change of +10 % when both runs share a step's noise and have their own."""
    random, hits = np.random.default_rng(7), 0
    for _ in range(repeats):
        own = random.normal(size=(steps + 30, 2))
        for step in range(1, len(own)):
            own[step] += correlation * own[step - 1]
        shared = random.normal(scale=5, size=(steps, 1))
        values = np.array([100.0, 110.0]) + own[30:] + shared * [1.0, 1.1]
        interval = Bootstrap(values).interval(ratio)
        hits += interval.low <= 10 <= interval.high
    return hits / repeats


def test_95_of_100_intervals_hold_the_true_change_when_steps_are_independent() -> None:
    assert 0.92 <= coverage(0.0) <= 0.985


def test_neighbouring_steps_that_resemble_one_another_cost_little_coverage() -> None:
    assert coverage(0.3) >= 0.86


def test_pairing_takes_out_what_both_runs_share_at_a_step() -> None:
    random = np.random.default_rng(0)
    shared, own = random.normal(scale=20, size=(19, 1)), random.normal(scale=0.5, size=(19, 2))
    paired = Bootstrap(100 + shared + own).interval(ratio)
    mixed = Bootstrap(100 + np.hstack([shared, shared[::-1]]) + own).interval(ratio)
    assert paired.high - paired.low < 2 < mixed.high - mixed.low


def test_equal_runs_have_an_interval_of_exactly_zero_width_at_zero() -> None:
    values = np.repeat(np.random.default_rng(1).uniform(1, 2, (19, 1)), 2, axis=1)
    interval = Bootstrap(values).interval(ratio)
    assert interval == pytest.approx((0, 0), abs=1e-9)


def test_four_steps_give_no_interval_and_neither_does_a_baseline_of_zero() -> None:
    assert Bootstrap(np.ones((4, 2))).interval(ratio) is None
    assert Bootstrap(np.zeros((19, 2))).interval(ratio) is None


def test_the_same_data_give_the_same_interval() -> None:
    values = np.random.default_rng(3).uniform(1, 2, (50, 2))
    assert Bootstrap(values).interval(ratio) == Bootstrap(values).interval(ratio)


def test_students_t_is_within_1_percent_of_the_tables() -> None:
    tables = {2: 4.303, 3: 3.182, 6: 2.447, 10: 2.228, 30: 2.042}
    for freedom, value in tables.items():
        assert student_t(0.975, freedom) == pytest.approx(value, rel=0.01 if freedom > 2 else 0.03)


def test_wilsons_interval_of_81_in_263_is_the_published_one() -> None:
    # Newcombe 1998, table I, method 3.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)


def test_newcombes_interval_of_56_in_70_less_48_in_80_is_the_published_one() -> None:
    # Newcombe 1998 (differences), table II, method 10, case (a).
    assert newcombe(48 / 80, 80, 56 / 70, 70) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_an_interval_that_touches_zero_spans_it() -> None:
    assert Interval(0, 1).spans_zero and not Interval(0.1, 1).spans_zero
