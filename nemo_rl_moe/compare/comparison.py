"""A run against its baseline over one window of steps: every row with its change, its interval and what to know."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nemo_rl_moe.compare.accuracy import Accuracy, accuracies
from nemo_rl_moe.compare.health import Health, check
from nemo_rl_moe.compare.matching import Differences, differences
from nemo_rl_moe.compare.names import ROWS, TOKENS_PER_SAMPLE, Row
from nemo_rl_moe.compare.reduce import gaps, largest, work
from nemo_rl_moe.compare.run_data import RunData
from nemo_rl_moe.compare.statistics import Bootstrap, FloatArray, Interval
from nemo_rl_moe.compare.window import Window, default_window

# Points by which the change of mean rates and of the whole window may differ before it is said.
_RATE_POINTS = 2.0
# Percent by which tokens per sample may differ before it is said.
_TOKENS_PERCENT = 1.0

Kind = Literal["mean", "mean of rates", "whole window", "largest"]


@dataclass(frozen=True)
class Line:
    """One row, or for rates one of its two readings.

    Attributes:
        row: what it is.
        kind: how the window became one number.
        base: baseline's number in the row's unit; None when there is none.
        run: the other run's.
        change: percent of the baseline or plain difference, as the row says; None without both numbers.
        interval: of the change, in the same unit; None with too few steps.
        note: why something is missing; None when nothing is.
    """

    row: Row
    kind: Kind
    base: float | None
    run: float | None
    change: float | None = None
    interval: Interval | None = None
    note: str | None = None

    @property
    def shown(self) -> Literal["better", "worse", "different", "no difference shown", "no interval", "-"]:
        """What the interval allows to say."""
        if self.change is None:
            return "-"
        if self.interval is None:
            return "no interval"
        if self.interval.spans_zero:
            return "no difference shown"
        if self.row.better is None:
            return "different"
        return "better" if (self.change < 0) == (self.row.better == "lower") else "worse"


@dataclass(frozen=True)
class Pair:
    """A run against its baseline.

    Attributes:
        base: the baseline's health.
        run: the other's.
        window: steps compared.
        differences: what differs besides the numbers.
        lines: rows that at least one run logged; without numbers when a run lacks steps.
        accuracies: validation at the steps that both validated.
        warnings: what a reader must know before quoting a number.
    """

    base: Health
    run: Health
    window: Window
    differences: Differences
    lines: list[Line]
    accuracies: list[Accuracy]
    warnings: list[str]

    @property
    def blocked(self) -> bool:
        """Whether a run lacks steps of the window, so that nothing is compared."""
        return self.base.blocked or self.run.blocked

    @property
    def name(self) -> str:
        """`base -> run`."""
        return f"{self.base.run.name} → {self.run.run.name}"


def compare(
    base: RunData,
    runs: Sequence[RunData],
    *,
    window: Window | None = None,
    treatment: Sequence[str] = (),
    validation_samples: int | None = None,
) -> list[Pair]:
    """Compares each run with the baseline.

    Args:
        base: the baseline.
        runs: the others.
        window: steps by their logged numbers; None takes all after the first up to the last that any run has.
        treatment: see `matching.differences`.
        validation_samples: samples of a validation, where neither metrics nor configuration say.

    Raises:
        UserError: there is no step to compare.
    """
    window = window or default_window([base, *runs])
    return [compare_pair(base, run, window, treatment, validation_samples) for run in runs]


# Damaged files hold numbers whose sums and quotients overflow: those have no finite mean, and are shown without one.
@np.errstate(all="ignore")
def compare_pair(
    base: RunData, run: RunData, window: Window, treatment: Sequence[str] = (), validation_samples: int | None = None
) -> Pair:
    """Compares one run with the baseline; see `compare`."""
    health = check(base, window), check(run, window)
    found = differences(base, run, treatment)
    if any(each.blocked for each in health):
        return Pair(*health, window, found, [], [], [])
    lines = _Lines(base, run, window).build()
    scores, unmatched = accuracies(base, run, window, validation_samples)
    repeats = [f"{each.name}: {note}" for each in (base, run) for note in each.notes]
    warnings = [*_token_warnings(lines), *_rate_warnings(lines), *unmatched, *repeats]
    return Pair(*health, window, found, lines, scores, warnings)


class _Lines:
    """Collects the columns that all rows need, so that one bootstrap serves them all."""

    def __init__(self, base: RunData, run: RunData, window: Window) -> None:
        self._runs = base, run
        self._window = window
        self._columns: list[FloatArray] = []
        self._index: dict[tuple[int, str], int] = {}
        self._pending: list[tuple[Line, Callable[[FloatArray], FloatArray] | None]] = []

    def build(self) -> list[Line]:
        """All lines with their intervals."""
        for row in ROWS:
            self._add(row)
        values = np.stack(self._columns, axis=1) if self._columns else np.zeros((len(self._window), 0))
        bootstrap = Bootstrap(values)
        finished = []
        for line, statistic in self._pending:
            interval = bootstrap.interval(statistic) if statistic is not None and line.change is not None else None
            finished.append(Line(line.row, line.kind, line.base, line.run, line.change, interval, line.note))
        return finished

    def _add(self, row: Row) -> None:
        logged = [row.metric in run.series for run in self._runs]
        if not any(logged):
            return
        if row.reduce == "largest":
            values = [largest(run, row.metric, self._window) for run in self._runs]
            self._pending.append((_line(row, "largest", values, _not_logged(self._runs, logged)), None))
            return
        notes = [gaps(run, row.metric, self._window) for run in self._runs]
        if any(notes):
            self._pending.append((Line(row, "mean", None, None, note="; ".join(filter(None, notes))), None))
            return
        at = [self._column(i, row.metric) for i in (0, 1)]
        if row.seconds is None:
            self._pending.append(self._ratio(row, "mean", (at[0], None), (at[1], None)))
            return
        self._pending.append(self._ratio(row, "mean of rates", (at[0], None), (at[1], None)))
        weights = [self._weights(i, row) for i in (0, 1)]
        if weights[0] is None or weights[1] is None:
            note = "whole window unknown: neither its seconds nor its tokens are logged"
            self._pending.append((Line(row, "whole window", None, None, note=note), None))
        else:
            self._pending.append(self._ratio(row, "whole window", weights[0], weights[1]))

    def _ratio(
        self, row: Row, kind: Kind, base: tuple[int, int | None], run: tuple[int, int | None]
    ) -> tuple[Line, Callable[[FloatArray], FloatArray]]:
        """A line of means (or quotients of two means) and its change as a function of the columns' means."""

        def value(means: FloatArray, of: tuple[int, int | None]) -> FloatArray:
            return means[..., of[0]] if of[1] is None else means[..., of[0]] / means[..., of[1]]

        def change(means: FloatArray) -> FloatArray:
            before, after = value(means, base), value(means, run)
            return (after / before - 1) * 100 if row.change == "percent" else after - before

        means = np.array([column.mean() for column in self._columns])
        return _line(row, kind, [float(value(means, base)), float(value(means, run))]), change

    def _weights(self, which: int, row: Row) -> tuple[int, int] | None:
        """Columns whose means' quotient is the rate of the whole window."""
        found = work(self._runs[which], row, self._window)
        if found is None:
            return None
        tokens, seconds = found
        return self._new((which, f"{row.key} tokens"), tokens), self._new((which, f"{row.key} s"), seconds)

    def _column(self, which: int, metric: str) -> int:
        if (which, metric) in self._index:
            return self._index[which, metric]
        return self._new((which, metric), self._window.cut(self._runs[which].series[metric]).values)

    def _new(self, key: tuple[int, str], values: NDArray[np.float64]) -> int:
        self._columns.append(values)
        self._index[key] = len(self._columns) - 1
        return self._index[key]


def _line(row: Row, kind: Kind, values: Sequence[float | None], note: str | None = None) -> Line:
    base, run = (value if value is not None and math.isfinite(value) else None for value in values)
    if base is None or run is None:
        return Line(row, kind, base, run, note=note)
    if row.change == "difference":
        return Line(row, kind, base, run, run - base)
    if base == 0:
        return Line(row, kind, base, run, 0.0 if run == 0 else None, note=None if run == 0 else "the baseline is 0")
    return Line(row, kind, base, run, (run / base - 1) * 100)


def _not_logged(runs: Sequence[RunData], logged: Sequence[bool]) -> str | None:
    lacking = [run.name for run, has in zip(runs, logged, strict=True) if not has]
    return f"{lacking[0]} does not log it" if lacking else None


def _token_warnings(lines: Sequence[Line]) -> list[str]:
    line = next((each for each in lines if each.row.metric == TOKENS_PER_SAMPLE), None)
    if line is None or line.change is None or abs(line.change) < _TOKENS_PERCENT:
        return []
    return [
        f"tokens per sample differ: {line.base:.0f} → {line.run:.0f} ({line.change:+.1f} %). Step times are of unequal "
        "work; compare throughput, and not by its mean of rates alone"
    ]


def _rate_warnings(lines: Sequence[Line]) -> list[str]:
    found = []
    by_key = {(line.row.key, line.kind): line for line in lines}
    for (key, kind), mean in by_key.items():
        whole = by_key.get((key, "whole window"))
        if kind != "mean of rates" or whole is None or mean.change is None or whole.change is None:
            continue
        apart = abs(mean.change - whole.change)
        if apart > _RATE_POINTS:
            found.append(
                f"{mean.row.label} throughput: {mean.change:+.1f} % as a mean of per-step rates, {whole.change:+.1f} % "
                f"over the whole window, {apart:.1f} points apart. Wall time goes by the whole window"
            )
    return found
