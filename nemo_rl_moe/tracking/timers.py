"""Where a step's wall time goes: phases that never overlap within a thread, and a remainder that is shown too."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# Always reported, so that a phase a recipe skips reads 0 and not "missing".
PHASES = ("generation", "policy_and_reference_logprobs", "policy_training", "weight_sync", "reward", "data")
_WAITING = "exposed_generation"


@dataclass
class _Frame:
    name: str
    since: float
    absorbs: bool


class PhaseTimer:
    """Times the phases of steps.

    The clock of a step runs from the previous `step()` (for the first one, from `start()`) to its own `step()`, so the
    total times of all steps add up to the wall time of the loop, logging included. Phases may nest; time counts for the
    innermost only, so the phases of one thread add up to no more than the total.

    Phases of other threads (a generator that runs ahead) are added under their names too. They overlap the step, so
    only the thread that called `start()`, the driver, counts towards `exposed_generation` and `other`.

    Args:
        clock: monotonic seconds; replaced in tests only.
        on_phase: called in the driver's thread with the name of each phase that begins, and with None at its end.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, on_phase: Callable[[str | None], None] | None = None
    ) -> None:
        self._clock = clock
        self._on_phase = on_phase
        self._driver = threading.get_ident()
        self._began: float | None = None
        self._lock = threading.Lock()
        self._all: dict[str, float] = defaultdict(float)
        self._own: dict[str, float] = defaultdict(float)
        self._local = threading.local()

    def start(self) -> None:
        """Begins the first step and forgets what was timed before; later steps begin when the one before ends.

        Raises:
            RuntimeError: a phase of this thread is open.
        """
        if self._stack:
            raise RuntimeError(f"start() inside the phase {self._stack[-1].name!r}")
        if self._began is not None:
            return
        self._driver = threading.get_ident()
        self._take()
        self._began = self._clock()

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Times a block; inner phases take their time out of it."""
        return self._open(name, absorbs=False)

    def timed(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Times a block with all that is in it: phases inside are part of it and not counted under their own names.

        For work that uses the step's parts outside its training path, such as validation.
        """
        return self._open(name, absorbs=True)

    def step(self) -> dict[str, float]:
        """Ends the step and begins the next.

        Returns:
            Seconds under `timing/train/`: `total_step_time`, every phase of `PHASES` and any other that occurred,
            `exposed_generation` (the driver's share of generation, and its waits for it), and `other` (the total less
            all phases of the driver).

        Raises:
            RuntimeError: `start()` was never called, or a phase of this thread is open.
        """
        began, now = self._span("step()")
        self._began = now
        return self._seconds(now - began, *self._take())

    def so_far(self) -> dict[str, float]:
        """What `step()` would return now; the step goes on.

        Raises:
            RuntimeError: `start()` was never called, or a phase of this thread is open.
        """
        began, now = self._span("so_far()")
        with self._lock:
            every, own = dict(self._all), dict(self._own)
        return self._seconds(now - began, every, own)

    def _span(self, caller: str) -> tuple[float, float]:
        """When the step began, and now."""
        if self._began is None or self._stack:
            raise RuntimeError(f"{caller} needs start() before it and no open phase")
        return self._began, self._clock()

    @staticmethod
    def _seconds(total: float, every: dict[str, float], own: dict[str, float]) -> dict[str, float]:
        exposed = own.get("generation", 0.0) + own.get(_WAITING, 0.0)
        seconds = dict.fromkeys(PHASES, 0.0) | every
        seconds |= {"total_step_time": total, _WAITING: exposed, "other": max(0.0, total - sum(own.values()))}
        return {f"timing/train/{name}": value for name, value in seconds.items()}

    @contextlib.contextmanager
    def _open(self, name: str, *, absorbs: bool) -> Iterator[None]:
        stack = self._stack
        if stack:
            self._charge(stack[-1])
            if stack[-1].absorbs:
                name, absorbs = stack[-1].name, True
        stack.append(_Frame(name, self._clock(), absorbs))
        self._tell(name)
        try:
            yield
        finally:
            self._charge(stack.pop())
            if stack:
                stack[-1].since = self._clock()
            self._tell(stack[-1].name if stack else None)

    def _charge(self, frame: _Frame) -> None:
        now = self._clock()
        with self._lock:
            self._all[frame.name] += now - frame.since
            if threading.get_ident() == self._driver:
                self._own[frame.name] += now - frame.since

    def _take(self) -> tuple[dict[str, float], dict[str, float]]:
        with self._lock:
            taken = dict(self._all), dict(self._own)
            self._all.clear()
            self._own.clear()
        return taken

    def _tell(self, name: str | None) -> None:
        if self._on_phase is not None and threading.get_ident() == self._driver:
            self._on_phase(name)

    @property
    def _stack(self) -> list[_Frame]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        return self._local.stack
