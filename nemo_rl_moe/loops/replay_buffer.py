"""Prompt groups between their admission and the step that trains on them, with an exact bound on their age.

Nothing here knows Ray, engines or tensors: the buffer only keeps order and counts, which is what has to be right.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

from nemo_rl_moe.errors import PhaseTimeout

Item = TypeVar("Item")
Result = TypeVar("Result")


class GroupState(Enum):
    """Life of a prompt group: pending -> generating -> ready -> trained; a failure leads from generating to pending."""

    PENDING = "pending"
    GENERATING = "generating"
    READY = "ready"
    TRAINED = "trained"


@dataclass(eq=False)
class PromptGroup(Generic[Item, Result]):
    """One prompt and the responses to it.

    Attributes:
        target: version of the weights that will train on it.
        slot: its place among the groups of its target.
        item: the prompt.
        state: where it is in its life.
        started: version of the weights under which it was last given to a generator; None before.
        attempts: how often it was given to a generator.
        result: its samples, once ready.
    """

    target: int
    slot: int
    item: Item
    state: GroupState = GroupState.PENDING
    started: int | None = None
    attempts: int = 0
    result: Result | None = None


class ReplayBuffer(Generic[Item, Result]):
    """Groups in the order of the steps that train on them. Safe to use from several threads.

    The bound holds by admission: groups for the weights of version t are admitted from version t - max_age on, so
    whichever of the versions t - max_age to t samples them, their age is at most max_age when they are trained. Nothing
    is ever discarded, and a slow prompt holds its place: its share of what is trained is its share of the data.

    Args:
        max_age: versions that a sample may be behind the weights that train on it.
        version: of the weights that the generators hold and the first step trains.
        last: version that the last step trains; nothing is admitted for later ones.
    """

    def __init__(self, max_age: int, version: int, last: int) -> None:
        self.max_age = max_age
        self._version = version
        self._last = last
        self._next_target = version
        self._groups: dict[int, list[PromptGroup[Item, Result]]] = {}
        self._marks: dict[int, Any] = {}
        self._ended = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    @property
    def version(self) -> int:
        """Version of the weights that the generators hold."""
        with self._changed:
            return self._version

    def next_target(self) -> int | None:
        """Version whose groups may be admitted now; None when the bound, the last step or the data's end forbids it."""
        with self._changed:
            target = self._next_target
            return None if self._ended or target > min(self._version + self.max_age, self._last) else target

    def admit(self, items: Sequence[Item], mark: Any = None) -> list[PromptGroup[Item, Result]]:
        """Admits all groups of the next target.

        Args:
            items: prompts of one step, in order.
            mark: comes back from `take` with them.

        Raises:
            RuntimeError: `next_target` is None.
        """
        with self._changed:
            target = self.next_target()
            if target is None:
                raise RuntimeError(f"no groups can be admitted at version {self._version} with max_age {self.max_age}")
            groups = [PromptGroup[Item, Result](target, slot, item) for slot, item in enumerate(items)]
            self._groups[target], self._marks[target] = groups, mark
            self._next_target += 1
            return groups

    def end(self) -> None:
        """The data has ended: what was admitted is the last."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def begin(self, group: PromptGroup[Item, Result]) -> None:
        """A generator gets the group."""
        with self._changed:
            self._move(group, GroupState.PENDING, GroupState.GENERATING)
            group.started = self._version
            group.attempts += 1

    def retry(self, group: PromptGroup[Item, Result]) -> None:
        """Its generator failed: the group waits for another attempt, in its old place."""
        with self._changed:
            self._move(group, GroupState.GENERATING, GroupState.PENDING)

    def finish(self, group: PromptGroup[Item, Result], result: Result) -> None:
        """The group's samples are there and scored."""
        with self._changed:
            self._move(group, GroupState.GENERATING, GroupState.READY)
            group.result = result
            self._changed.notify_all()

    def pending(self) -> list[PromptGroup[Item, Result]]:
        """Groups that wait for a generator, oldest target first."""
        with self._changed:
            return [g for groups in self._groups.values() for g in groups if g.state is GroupState.PENDING]

    def take(self, timeout_s: float | None) -> tuple[list[PromptGroup[Item, Result]], Any] | None:
        """Waits for all groups of the weights' present version and hands them over to be trained, in order.

        Args:
            timeout_s: None waits for ever.

        Returns:
            The groups, and the mark they were admitted with; None when the data ended before them.

        Raises:
            PhaseTimeout: they are not ready in time; the groups stay.
            BaseException: what `fail` was told.
        """
        with self._changed:
            target = self._version
            self._wait(lambda: self._all_ready(target) or (self._ended and target >= self._next_target), timeout_s)
            if target not in self._groups:
                return None
            groups = self._groups.pop(target)
            for group in groups:
                self._move(group, GroupState.READY, GroupState.TRAINED)
            return groups, self._marks.pop(target)

    def settle(self, timeout_s: float | None = None) -> None:
        """Waits until no admitted group is on its way.

        Raises:
            PhaseTimeout: some still are.
            BaseException: what `fail` was told.
        """
        with self._changed:
            self._wait(lambda: all(map(self._all_ready, self._groups)), timeout_s)

    def advance(self) -> None:
        """The generators hold the next version.

        Raises:
            RuntimeError: the groups of the present version were not taken; they would become too old.
        """
        with self._changed:
            if self._version in self._groups:
                raise RuntimeError(f"version {self._version + 1} before the groups of {self._version} were trained")
            self._version += 1
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Whoever waits, now or later, gets the error."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait_for_room(self, timeout_s: float) -> None:
        """Waits until `next_target` may have changed."""
        with self._changed:
            if self.next_target() is None:
                self._changed.wait(timeout_s)

    def counts(self) -> dict[str, int]:
        """Groups in each state of those that are not trained yet."""
        with self._changed:
            return Counter(g.state.value for groups in self._groups.values() for g in groups)

    def _all_ready(self, target: int) -> bool:
        return target in self._groups and all(g.state is GroupState.READY for g in self._groups[target])

    def _wait(self, condition: Any, timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not condition():
            if self._error is not None:
                raise self._error
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0 and timeout_s is not None:
                raise PhaseTimeout("samples of the next step", f"the replay buffer ({dict(self.counts())})", timeout_s)
            self._changed.wait(left)

    def _move(self, group: PromptGroup[Item, Result], before: GroupState, after: GroupState) -> None:
        if group.state is not before:
            raise RuntimeError(f"group {group.target}/{group.slot} is {group.state.value}, expected {before.value}")
        group.state = after
