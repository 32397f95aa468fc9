"""The steps that are compared, by the numbers that the runs logged."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nemo_rl_moe.compare.run_data import RunData, Series
from nemo_rl_moe.errors import UserError

# The first step compiles, allocates and fills caches.
_WARMUP = 1
# Longer than any run, short enough for arrays of every step.
_MOST_STEPS = 10_000_000


@dataclass(frozen=True)
class Window:
    """Steps `first` to `last`, both included."""

    first: int
    last: int

    @property
    def steps(self) -> NDArray[np.int64]:
        """int64 [N], every step number."""
        return np.arange(self.first, self.last + 1, dtype=np.int64)

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return f"steps {self.first}-{self.last}"

    def cut(self, series: Series) -> Series:
        """The part of a series that lies inside."""
        low, high = np.searchsorted(series.steps, [self.first, self.last + 1])
        return Series(series.steps[low:high], series.values[low:high])


def parse_window(text: str) -> Window:
    """`2-20` as a window.

    Raises:
        UserError: no such range, with what was expected.
    """
    found = re.fullmatch(r"(\d+)-(\d+)", text.strip())
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise UserError(f"--steps {text}: expected A-B, logged step numbers with 1 <= A <= B, such as 2-20")
    return _window(int(found[1]), int(found[2]))


def default_window(runs: Sequence[RunData]) -> Window:
    """From after the warm-up step to the last step of any run: one that ended early is then seen to lack steps.

    Where no run has a step after the warm-up, to the last that was planned: the report then says why there is none.

    Raises:
        UserError: no run has such a step or says how many were planned.
    """
    logged = np.unique(np.concatenate([run.training_steps for run in runs]))
    after = logged[logged > _WARMUP]
    if len(after):
        return _window(int(after[0]), int(after[-1]))
    planned = [run.ending.planned_steps or 0 for run in runs]
    if max(planned) > _WARMUP:
        return _window(_WARMUP + 1, max(planned))
    known = f"step {logged[-1]}" if len(logged) else "no step"
    raise UserError(f"{', '.join(run.name for run in runs)}: {known} logged, expected steps after step {_WARMUP}")


def _window(first: int, last: int) -> Window:
    if last - first >= _MOST_STEPS:
        raise UserError(f"steps {first}-{last}: expected at most {_MOST_STEPS} steps; name a window with --steps A-B")
    return Window(first, last)


def ranges(steps: Sequence[int] | NDArray[np.int64], limit: int = 4) -> str:
    """Step numbers in words: `3, 7-9, 12` and how many more."""
    numbers = [int(step) for step in steps]
    groups: list[list[int]] = []
    for step in numbers:
        if groups and step == groups[-1][-1] + 1:
            groups[-1].append(step)
        else:
            groups.append([step])
    shown = [f"{group[0]}-{group[-1]}" if len(group) > 1 else str(group[0]) for group in groups[:limit]]
    left = sum(map(len, groups[limit:]))
    return ", ".join(shown) + (f" and {left} more" if left else "")
