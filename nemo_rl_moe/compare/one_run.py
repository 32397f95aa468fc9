"""What a report says of one run: every row over a window of steps, its validations, and where its time went."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nemo_rl_moe.compare import accuracy
from nemo_rl_moe.compare.health import Health, check
from nemo_rl_moe.compare.names import ACCURACY, LEARNING, RESOURCES, ROWS, Row
from nemo_rl_moe.compare.phases import split
from nemo_rl_moe.compare.reduce import largest, work
from nemo_rl_moe.compare.run_data import RunData, Series
from nemo_rl_moe.compare.statistics import Interval, wilson
from nemo_rl_moe.compare.window import Window, default_window
from nemo_rl_moe.errors import UserError

# Steps at either end of the window whose means show where the run came from and where it got to.
ENDS = 10
# What matters in one run and has no place in a comparison.
_MORE = (
    Row("loss", LEARNING, "loss", "train/loss", ""),
    Row("kl_penalty", LEARNING, "KL to the reference", "train/kl_penalty", "nat"),
    Row("grad_norm", LEARNING, "gradient norm", "train/grad_norm", ""),
    Row("entropy", LEARNING, "entropy", "train/approx_entropy", "nat"),
    Row("truncated", RESOURCES, "truncated responses", "train/truncated_fraction", ""),
)


@dataclass(frozen=True)
class Summary:
    """One row of one run over a window.

    Attributes:
        row: what it is.
        kind: how the steps became one number: `mean`, `mean of rates`, `whole window` or `largest`.
        value: that number; None when there is none.
        first, last: means of the first and last steps of the window; None with fewer than two steps.
        low, high: extremes.
        note: steps that are missing or not finite; None when all are there.
    """

    row: Row
    kind: str
    value: float | None
    first: float | None = None
    last: float | None = None
    low: float | None = None
    high: float | None = None
    note: str | None = None

    @property
    def numbers(self) -> tuple[float | None, ...]:
        """Value, first, last, lowest, highest."""
        return self.value, self.first, self.last, self.low, self.high


@dataclass(frozen=True)
class Validation:
    """An accuracy with Wilson's interval, which is None where the number of samples is not known."""

    metric: str
    step: int
    value: float
    samples: int | None
    interval: Interval | None


@dataclass(frozen=True)
class Report:
    """One run.

    Attributes:
        health: the run, its window and what is wrong with it.
        rows: numbers, those that the run logged.
        validations: all of the run, by metric and step.
        shares: part of the window's time by label; they add up to 1.
    """

    health: Health
    rows: list[Summary]
    validations: list[Validation]
    shares: dict[str, float]

    @property
    def run(self) -> RunData:
        return self.health.run

    @property
    def ends(self) -> int:
        """Steps at either end whose means are shown; fewer where the window has few."""
        steps, window = self.run.training_steps, self.health.window
        return _end_steps(int(((steps >= window.first) & (steps <= window.last)).sum()))


@np.errstate(all="ignore")
def report(run: RunData, window: Window | None = None, validation_samples: int | None = None) -> Report:
    """Sums up a run.

    Args:
        run: the run, which may have no step at all.
        window: steps by their logged numbers; None takes all after the first.
        validation_samples: samples of a validation, where neither metrics nor configuration say.
    """
    window = window or _window(run)
    rows = [each for row in (*ROWS, *_MORE) for each in _summaries(run, row, window)]
    order = list(dict.fromkeys(row.group for row in ROWS))
    rows.sort(key=lambda each: order.index(each.row.group))
    return Report(check(run, window), rows, _validations(run, validation_samples), _shares(run, window))


def _window(run: RunData) -> Window:
    """As in a comparison; of a run that has only its first step, that one."""
    try:
        return default_window([run])
    except UserError:
        return Window(1, 1)


def _summaries(run: RunData, row: Row, window: Window) -> list[Summary]:
    series = run.series.get(row.metric)
    if series is None:
        return []
    if row.reduce == "largest":
        return [Summary(row, "largest", largest(run, row.metric, window))]
    part = window.cut(series)
    good = part.values[np.isfinite(part.values)]
    if not len(good):
        return [Summary(row, "mean", None, note=_note(part, window))]
    mean, note = "mean" if row.seconds is None else "mean of rates", _note(part, window)
    first, last = (float(good[own].mean()) if own else None for own in _ends(len(good)))
    found = [Summary(row, mean, float(good.mean()), first, last, float(good.min()), float(good.max()), note)]
    if row.seconds is not None and note is None and (done := work(run, row, window)):
        first, last = (_rate(*done, own) if own else None for own in _ends(len(part.steps)))
        found.append(Summary(row, "whole window", _rate(*done, slice(None)), first, last))
    return found


def _ends(count: int) -> tuple[slice | None, slice | None]:
    """The first and the last steps of so many, which have no step in common."""
    own = _end_steps(count)
    return (slice(0, own), slice(count - own, count)) if own else (None, None)


def _end_steps(count: int) -> int:
    return min(ENDS, count // 2)


def _rate(tokens: np.ndarray, seconds: np.ndarray, part: slice) -> float | None:
    return float(tokens[part].sum() / seconds[part].sum()) if seconds[part].sum() > 0 else None


def _note(part: Series, window: Window) -> str | None:
    """How many of the window's steps the numbers are of, when not all."""
    count = int(np.isfinite(part.values).sum())
    return None if count == len(window) else f"of {count} of {len(window)} steps"


def _validations(run: RunData, samples: int | None) -> list[Validation]:
    names = sorted(name for name in run.series if name.startswith(f"{ACCURACY}/"))
    # Of one environment alone the accuracy is the overall one.
    names = [ACCURACY] * (ACCURACY in run.series) + names * (len(names) > 1 or ACCURACY not in run.series)
    found = []
    for name in names:
        for step, value in zip(*run.series[name], strict=True):
            if np.isfinite(value):
                n = accuracy.samples_of(run, name, int(step), samples)
                known = n is not None and accuracy.is_share(float(value), n)
                interval = wilson(float(value) * n, n) if n is not None and known else None
                found.append(Validation(name, int(step), float(value), n, interval))
    return found


def _shares(run: RunData, window: Window) -> dict[str, float]:
    steps, _, parts = split(run)
    inside = (steps >= window.first) & (steps <= window.last)
    total = sum(float(values[inside].sum()) for values in parts.values())
    return {label: float(values[inside].sum()) / total for label, values in parts.items()} if total else {}
