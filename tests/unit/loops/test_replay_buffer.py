"""The buffer guards three promises: no sample older than the bound, every prompt trained once, never a deadlock."""

from __future__ import annotations

import heapq
import itertools
import threading
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_moe.errors import PhaseTimeout
from nemo_rl_moe.loops.replay_buffer import GroupState, PromptGroup, ReplayBuffer


@dataclass
class VirtualRun:
    """A generator and a trainer in virtual time around a real buffer.

    Attributes:
        per_step: prompts of a step.
        max_age: bound on age.
        prompts: prompts that the data holds.
        steps: steps at most.
        durations: seconds of the attempts, in the order in which they begin, again from the front when used up.
        failures: whether each of these attempts fails.
        train_s: seconds of a step's training.
    """

    per_step: int
    max_age: int
    prompts: int
    steps: int
    durations: list[float]
    failures: list[bool]
    train_s: float
    trained: list[int] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)

    def run(self) -> VirtualRun:
        """Runs to the end; fails when nothing can happen any more before it."""
        buffer: ReplayBuffer[int, int] = ReplayBuffer(self.max_age, version=1, last=self.steps)
        data, attempts = iter(range(self.prompts)), itertools.count()
        events: list[tuple[float, int, PromptGroup | None]] = []
        now, training = 0.0, False
        while True:
            while buffer.next_target() is not None:
                step = list(itertools.islice(data, self.per_step))
                if len(step) < self.per_step:
                    buffer.end()
                else:
                    buffer.admit(step)
            for group in buffer.pending():
                buffer.begin(group)
                number = next(attempts)
                heapq.heappush(events, (now + self.durations[number % len(self.durations)], number, group))
            if not training:
                try:
                    taken = buffer.take(0) if buffer.version <= self.steps else None
                except PhaseTimeout:
                    pass
                else:
                    if taken is None:
                        return self
                    self._train(buffer, taken[0])
                    training = True
                    heapq.heappush(events, (now + self.train_s, next(attempts), None))
                    continue
            assert events, f"deadlock at version {buffer.version}: {buffer.counts()}"
            now, number, group = heapq.heappop(events)
            if group is None:
                buffer.advance()
                training = False
            elif self.failures[number % len(self.failures)] and group.attempts < 4:
                buffer.retry(group)
            else:
                buffer.finish(group, group.item)

    def _train(self, buffer: ReplayBuffer[int, int], groups: list[PromptGroup]) -> None:
        self.trained += [group.item for group in groups]
        self.ages += [buffer.version - group.started for group in groups]


@settings(max_examples=300, deadline=None)
@given(
    per_step=st.integers(1, 5),
    max_age=st.integers(0, 4),
    prompts=st.integers(0, 40),
    steps=st.integers(1, 12),
    durations=st.lists(st.floats(0.01, 20), min_size=1, max_size=30),
    failures=st.lists(st.booleans(), min_size=1, max_size=30),
    train_s=st.floats(0.01, 10),
)
def test_no_sample_passes_its_age_and_every_prompt_is_trained_once_in_order(**setting) -> None:
    run = VirtualRun(**setting).run()
    steps = min(run.steps, run.prompts // run.per_step)
    assert run.trained == list(range(steps * run.per_step))
    assert all(0 <= age <= run.max_age for age in run.ages)


def test_slow_generation_reaches_the_bound_of_1_and_not_2() -> None:
    assert set(VirtualRun(2, 1, 40, 20, [1.0], [False], 5.0).run().ages) == {0, 1}
    assert set(VirtualRun(2, 3, 40, 20, [1.0], [False], 5.0).run().ages) == {0, 1, 2, 3}


def test_at_age_0_every_sample_is_of_the_weights_it_trains() -> None:
    assert set(VirtualRun(3, 0, 30, 10, [1.0, 7.0], [True, False], 2.0).run().ages) == {0}


def test_a_prompt_five_times_as_slow_is_a_quarter_of_what_is_trained() -> None:
    """Discarding what is late would starve it."""
    run = VirtualRun(4, 1, 80, 20, [1, 1, 1, 5], [False], 1.0).run()
    assert sum(item % 4 == 3 for item in run.trained) / len(run.trained) == 0.25


def test_a_sample_of_version_10_may_train_at_10_and_11_and_not_at_12() -> None:
    buffer: ReplayBuffer[str, str] = ReplayBuffer(1, version=10, last=20)
    assert [buffer.next_target(), [g.target for g in buffer.admit(["a"])]] == [10, [10]]
    assert [g.target for g in buffer.admit(["b"])] == [11]
    assert buffer.next_target() is None
    with pytest.raises(RuntimeError, match="no groups can be admitted at version 10 with max_age 1"):
        buffer.admit(["c"])


def test_fewer_prompts_than_the_buffer_holds_are_trained_and_then_the_data_has_ended() -> None:
    run = VirtualRun(2, 4, 5, 100, [1.0], [False], 1.0).run()
    assert run.trained == [0, 1, 2, 3]


def test_the_last_groups_fail_and_are_trained_nevertheless() -> None:
    run = VirtualRun(2, 1, 8, 4, [1.0], [False] * 6 + [True] * 6, 1.0).run()
    assert run.trained == list(range(8))


def test_nothing_is_admitted_for_steps_after_the_last() -> None:
    buffer: ReplayBuffer[str, str] = ReplayBuffer(3, version=1, last=2)
    buffer.admit(["a"])
    buffer.admit(["b"])
    assert buffer.next_target() is None


def test_the_version_does_not_move_past_groups_that_were_not_trained() -> None:
    buffer: ReplayBuffer[str, str] = ReplayBuffer(1, version=1, last=9)
    buffer.admit(["a"])
    with pytest.raises(RuntimeError, match="version 2 before the groups of 1 were trained"):
        buffer.advance()


def test_a_group_goes_through_its_life_in_order_only() -> None:
    buffer: ReplayBuffer[str, str] = ReplayBuffer(0, version=1, last=9)
    (group,) = buffer.admit(["a"], mark="state")
    with pytest.raises(RuntimeError, match="group 1/0 is pending, expected generating"):
        buffer.finish(group, "sample")
    buffer.begin(group)
    buffer.retry(group)
    buffer.begin(group)
    assert buffer.counts() == {"generating": 1}
    buffer.finish(group, "sample")
    assert buffer.take(0) == ([group], "state")
    assert [group.state, group.attempts, group.started, group.result] == [GroupState.TRAINED, 2, 1, "sample"]


def test_samples_that_never_come_are_an_error_with_the_buffer_s_counts() -> None:
    buffer: ReplayBuffer[str, str] = ReplayBuffer(0, version=1, last=9)
    buffer.begin(buffer.admit(["a", "b"])[0])
    with pytest.raises(PhaseTimeout, match=r"replay buffer \(\{'generating': 1, 'pending': 1\}\) within 0.01 s"):
        buffer.take(0.01)


def test_who_waits_gets_the_error_of_the_other_thread() -> None:
    buffer: ReplayBuffer[str, str] = ReplayBuffer(0, version=1, last=9)
    buffer.admit(["a"])
    threading.Timer(0.05, buffer.fail, [ValueError("no engine left")]).start()
    with pytest.raises(ValueError, match="no engine left"):
        buffer.take(10)
    with pytest.raises(ValueError, match="no engine left"):
        buffer.settle(10)
