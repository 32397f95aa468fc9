"""A comparison as tables of text, the same for terminal, Markdown and page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from nemo_rl_moe.compare.accuracy import Accuracy
from nemo_rl_moe.compare.comparison import Line, Pair
from nemo_rl_moe.compare.health import Health
from nemo_rl_moe.compare.matching import ABSENT, Difference
from nemo_rl_moe.compare.names import ROWS, STEP_TIME, THROUGHPUT
from nemo_rl_moe.compare.statistics import LEVEL, MIN_STEPS, Interval

# Their rows have the same labels.
_PHASES = (STEP_TIME, THROUGHPUT)
ACCURACY_TITLE = "Validation accuracy"
NO_DIFFERENCE = "no difference shown"
_FACTOR_PERCENT = 900.0
HEADS = ("", "baseline", "run", "change", f"{LEVEL:.0%} interval".replace("%", " %"), "")


@dataclass(frozen=True)
class TableRow:
    """One line of a table.

    Attributes:
        label: what it is.
        base, run: numbers as text; `-` without one.
        change: with its sign and unit.
        interval: of the change.
        remark: what else to know; empty mostly.
        shown: as `Line.shown`.
        ranges: interval of either number by itself, as text; empty mostly.
    """

    label: str
    base: str
    run: str
    change: str
    interval: str
    remark: str
    shown: str
    ranges: tuple[str, str] = ("", "")

    @property
    def numbers(self) -> tuple[str, str]:
        """Both numbers with their own intervals."""
        base, run = (f"{n} ({r})" if r else n for n, r in zip((self.base, self.run), self.ranges, strict=True))
        return base, run

    @property
    def cells(self) -> tuple[str, ...]:
        return self.label, *self.numbers, self.change, self.interval, self.remark


@dataclass(frozen=True)
class Section:
    """Rows under a heading."""

    title: str
    rows: list[TableRow]


def sections(pair: Pair) -> list[Section]:
    """All numbers of a pair."""
    found = []
    for group, lines in groupby(pair.lines, key=lambda line: line.row.group):
        own = list(lines)
        units = {line.row.unit for line in own}
        unit = units.pop() if len(units) == 1 else None
        found.append(Section(f"{group} ({unit})" if unit else group, [_row(line, unit is None) for line in own]))
    if pair.accuracies:
        found.append(Section(ACCURACY_TITLE, [accuracy_row(each) for each in pair.accuracies]))
    return found


def heading(pair: Pair) -> str:
    """`base → run: not matched: also differs in grpo.seed`."""
    return f"{pair.name}: {pair.differences.verdict}: {pair.differences.why}"


def observations(pair: Pair) -> str:
    """The window, and whether all numbers in it are finite."""
    count = len(pair.window)
    text = f"{pair.window}, by logged step number: {count} observation{'s'[: count != 1]} of each metric"
    if pair.blocked:
        return f"{pair.window}, by logged step number: not compared, steps are missing"
    whole = not (pair.base.nonfinite or pair.run.nonfinite)
    return f"{text}; all metrics finite ({pair.base.checked} and {pair.run.checked})" if whole else text


def problems(pair: Pair) -> list[str]:
    """What is wrong with either run."""
    return [f"{each.run.name}: {problem}" for each in (pair.base, pair.run) for problem in each.problems]


def hint(pair: Pair) -> str | None:
    """Another window that both runs have; None when there is none or none is needed."""
    steps = [set(each.run.training_steps.tolist()) for each in (pair.base, pair.run)]
    first, last = pair.window.first, pair.window.first
    while last in steps[0] and last in steps[1]:
        last += 1
    return f"--steps {first}-{last - 1} compares what both have" if pair.blocked and last > first else None


def footnotes(pair: Pair) -> list[str]:
    """How to read the intervals."""
    if pair.blocked:
        return []
    if len(pair.window) < MIN_STEPS:
        return [f"No intervals: {len(pair.window)} steps, of at least {MIN_STEPS}."]
    tested = sum(line.interval is not None for line in pair.lines)
    return [
        f"Intervals: paired block bootstrap over steps, {LEVEL:.0%} each. They cover the spread between steps of this "
        f"pair, not between runs: one pair cannot tell a systematic effect from a difference between two runs. Of "
        f"{tested} intervals about {tested * (1 - LEVEL):.0f} would miss zero by chance.".replace("%", " %"),
        "Rates: the mean of per-step rates weighs every step alike; the whole window is all tokens over all seconds.",
    ]


def difference_rows(found: Sequence[Difference]) -> list[tuple[str, str, str, str]]:
    """Kind, key, before, after; confounders first."""
    order = {"confounder": 0, "treatment": 1, "logging": 2}
    ordered = sorted(found, key=lambda d: order[d.kind])
    return [(d.kind, d.key, side(d.before), side(d.after)) for d in ordered]


def side(value: Any) -> str:
    """A value of a configuration."""
    if value is ABSENT:
        return "(absent)"
    return value if isinstance(value, str) and value else json.dumps(value, default=str, ensure_ascii=False)


def number(value: float | None, unit: str = "") -> str:
    """A number with as many decimals as its size needs: about five significant digits for means."""
    if value is None:
        return "-"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    size = abs(value)
    if not 1e-4 <= size < 1e7:
        return f"{value:.{4 if size > 1 else 3}g}"
    if unit in ("s", "tokens/s", "GiB"):
        return f"{value:.2f}" if size >= 1 else f"{value:.{2 - math.floor(math.log10(size))}f}"
    if unit == "tokens" and size >= 100:
        return f"{value:.0f}"
    return f"{value:.{max(0, 4 - math.floor(math.log10(size)) - 1) + (size < 1)}f}"


def change_text(change: float | None, percent: bool) -> str:
    """`+16.4 %`, or a difference with its sign; from ten times the baseline on, the factor."""
    if change is None:
        return "-"
    return _signed(change, percent) + " %" * (percent and not _is_factor(change))


def interval_text(interval: Interval | None, percent: bool) -> str:
    """`+12.1 to +20.3`."""
    return "-" if interval is None else " to ".join(_signed(end, percent) for end in interval)


def _signed(change: float, percent: bool) -> str:
    if percent and _is_factor(change):
        return f"x {1 + change / 100:.3g}"
    text = f"{change:+.1f}" if percent else f"{change:+.5f}"
    # What rounds to nothing has no direction.
    return text if text.strip("+-0.") else text[1:]


def _is_factor(change: float) -> bool:
    """Whether percents say less than a factor does, as when the baseline is all but 0."""
    return change >= _FACTOR_PERCENT


def _row(line: Line, with_unit: bool) -> TableRow:
    label = line.row.label + (f" ({line.row.unit})" if with_unit and line.row.unit else "")
    if line.kind in ("mean of rates", "whole window"):
        label += f", {line.kind}"
    percent = line.row.change == "percent"
    remark = line.note or (NO_DIFFERENCE if line.shown == NO_DIFFERENCE else "")
    return TableRow(
        label,
        number(line.base, line.row.unit),
        number(line.run, line.row.unit),
        change_text(line.change, percent),
        interval_text(line.interval, percent),
        remark,
        line.shown,
    )


def accuracy_row(found: Accuracy) -> TableRow:
    """One validation of both runs."""
    name = found.metric.removeprefix("validation/accuracy").strip("/")
    shown = "no interval"
    if found.interval is not None:
        shown = NO_DIFFERENCE if found.interval.spans_zero else ("better" if found.change > 0 else "worse")
    remark = "; ".join(filter(None, [NO_DIFFERENCE if shown == NO_DIFFERENCE else None, found.note]))
    interval = found.interval
    return TableRow(
        f"{name + ', ' if name else ''}step {found.step}",
        f"{100 * found.base:.2f} %",
        f"{100 * found.run:.2f} %",
        f"{100 * found.change:+.2f} points",
        "-" if interval is None else f"{100 * interval.low:+.1f} to {100 * interval.high:+.1f}",
        remark,
        shown,
        (_range(found.intervals[0]), _range(found.intervals[1])),
    )


def _range(interval: Interval | None) -> str:
    return "" if interval is None else f"{100 * interval.low:.0f}-{100 * interval.high:.0f}"


def health_line(health: Health) -> str:
    """Name, source and end of a run, for the list of runs."""
    run = health.run
    steps = run.training_steps
    last = f"steps {steps[0]}-{steps[-1]}" if len(steps) else "no training step"
    state = (
        run.ending.state if run.ending.cause in (None, run.ending.state) else f"{run.ending.state}, {run.ending.cause}"
    )
    return f"{run.path} ({run.source}, {last}, {'end unknown' if state == 'unknown' else state})"


def not_logged(pair: Pair) -> list[str]:
    """Rows that neither run logs."""
    have = {line.row.key for line in pair.lines}
    missing = [] if pair.blocked else [row for row in ROWS if row.key not in have]
    return [row.label if row.group not in _PHASES else f"{row.label} ({row.group.lower()})" for row in missing]
