"""The step's clock: phases never count twice, nothing is lost."""

from __future__ import annotations

import threading

import pytest

from nemo_rl_moe.tracking.timers import PHASES, PhaseTimer


class Clock:
    """Seconds that move only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


def started() -> tuple[Clock, PhaseTimer]:
    clock = Clock()
    timer = PhaseTimer(clock)
    timer.start()
    return clock, timer


def test_phases_of_3_and_2_seconds_in_a_step_of_6_leave_1_second_other() -> None:
    clock, timer = started()
    with timer.phase("generation"):
        clock.pass_(3)
    clock.pass_(1)
    with timer.phase("policy_training"):
        clock.pass_(2)
    step = timer.step()
    assert step["timing/train/total_step_time"] == 6
    assert step["timing/train/generation"] == 3
    assert step["timing/train/policy_training"] == 2
    assert step["timing/train/other"] == 1


def test_so_far_tells_3_of_4_seconds_and_the_step_still_tells_all_6() -> None:
    clock, timer = started()
    with timer.phase("generation"):
        clock.pass_(3)
    clock.pass_(1)
    so_far = timer.so_far()
    with timer.phase("checkpointing"):
        with pytest.raises(RuntimeError, match=r"so_far\(\) needs"):
            timer.so_far()
        clock.pass_(2)
    step = timer.step()
    assert (so_far["timing/train/total_step_time"], so_far["timing/train/generation"]) == (4, 3)
    assert "timing/train/checkpointing" not in so_far
    assert step["timing/train/total_step_time"] == 6
    assert (step["timing/train/generation"], step["timing/train/checkpointing"]) == (3, 2)


def test_a_phase_entered_twice_in_a_step_adds_up_to_5() -> None:
    clock, timer = started()
    for seconds in (2, 3):
        with timer.phase("data"):
            clock.pass_(seconds)
    assert timer.step()["timing/train/data"] == 5


def test_a_nested_phase_of_2_seconds_is_taken_out_of_the_5_around_it() -> None:
    clock, timer = started()
    with timer.phase("reward"):
        clock.pass_(1)
        with timer.phase("data"):
            clock.pass_(2)
        clock.pass_(2)
    step = timer.step()
    assert (step["timing/train/reward"], step["timing/train/data"]) == (3, 2)
    assert step["timing/train/other"] == 0


def test_generation_inside_validation_counts_as_validation_only() -> None:
    clock, timer = started()
    with timer.phase("generation"):
        clock.pass_(1)
    with timer.timed("validation"):
        clock.pass_(1)
        with timer.phase("generation"), timer.phase("reward"):
            clock.pass_(4)
    step = timer.step()
    assert step["timing/train/validation"] == 5
    assert step["timing/train/generation"] == 1
    assert step["timing/train/reward"] == 0
    assert step["timing/train/total_step_time"] == 6


def test_steps_follow_each_other_without_a_gap_so_totals_add_up_to_the_wall_time_of_9() -> None:
    clock, timer = started()
    clock.pass_(2)
    first = timer.step()["timing/train/total_step_time"]
    clock.pass_(3)  # what logging the step takes, before the loop begins the next
    timer.start()
    with timer.phase("generation"):
        clock.pass_(4)
    second = timer.step()
    assert (first, second["timing/train/total_step_time"], second["timing/train/other"]) == (2, 7, 3)


def test_what_was_timed_before_the_first_start_is_forgotten() -> None:
    clock = Clock()
    timer = PhaseTimer(clock)
    with timer.phase("weight_sync"):
        clock.pass_(5)
    timer.start()
    clock.pass_(1)
    step = timer.step()
    assert step["timing/train/weight_sync"] == 0
    assert step["timing/train/total_step_time"] == 1


def test_every_phase_of_the_contract_is_reported_as_0_when_a_step_has_none() -> None:
    _, timer = started()
    step = timer.step()
    names = {"total_step_time", "exposed_generation", "other", *PHASES}
    assert step == {f"timing/train/{name}": 0.0 for name in names}


def test_in_one_thread_all_7_seconds_of_generation_are_exposed() -> None:
    clock, timer = started()
    with timer.phase("generation"):
        clock.pass_(7)
    step = timer.step()
    assert step["timing/train/exposed_generation"] == step["timing/train/generation"] == 7


def test_generation_of_another_thread_overlaps_and_only_the_wait_of_2_is_exposed() -> None:
    clock, timer = started()

    def generate() -> None:
        with timer.phase("generation"):
            clock.pass_(8)

    with timer.phase("policy_training"):
        thread = threading.Thread(target=generate)
        thread.start()
        thread.join()
    with timer.phase("exposed_generation"):
        clock.pass_(2)
    step = timer.step()
    assert step["timing/train/generation"] == 8
    assert step["timing/train/policy_training"] == 8
    assert step["timing/train/exposed_generation"] == 2
    assert step["timing/train/total_step_time"] == 10
    assert step["timing/train/other"] == 0


def test_a_phase_left_by_an_error_is_counted_and_closed() -> None:
    clock, timer = started()
    with pytest.raises(KeyError), timer.phase("reward"):
        clock.pass_(2)
        raise KeyError
    clock.pass_(1)
    step = timer.step()
    assert (step["timing/train/reward"], step["timing/train/other"]) == (2, 1)


def test_step_inside_a_phase_or_before_start_is_an_error() -> None:
    timer = PhaseTimer(Clock())
    with pytest.raises(RuntimeError, match=r"needs start\(\)"):
        timer.step()
    timer.start()
    with timer.phase("data"), pytest.raises(RuntimeError, match="no open phase"):
        timer.step()


def test_the_listener_hears_the_phase_that_runs_and_the_one_it_returns_to() -> None:
    heard: list[str | None] = []
    timer = PhaseTimer(Clock(), on_phase=heard.append)
    timer.start()
    with timer.phase("reward"), timer.phase("data"):
        pass
    assert heard == ["reward", "data", "reward", None]


def test_a_real_phase_costs_less_than_50_microseconds() -> None:
    timer = PhaseTimer()
    timer.start()
    for _ in range(2000):
        with timer.phase("data"):
            pass
    assert timer.step()["timing/train/total_step_time"] / 2000 < 50e-6
