"""Validation accuracy at the steps that both runs validated, with intervals from the number of samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_rl_moe.compare.names import ACCURACY, ACCURACY_SAMPLES
from nemo_rl_moe.compare.run_data import RunData
from nemo_rl_moe.compare.statistics import Interval, newcombe, wilson
from nemo_rl_moe.compare.window import Window, ranges

# An accuracy of 0/1 scores is a whole number of samples; logs and exports may have rounded it to four digits.
_ROUNDING = 1e-4
# More is no count of samples, but damage.
MOST_SAMPLES = 10**9


@dataclass(frozen=True)
class Accuracy:
    """One validation of both runs; accuracies and intervals are shares from 0 to 1.

    Attributes:
        metric: `validation/accuracy`, or of one environment.
        step: logged number.
        base, run: accuracies.
        samples: validation samples of each run; None where nothing says.
        intervals: of each accuracy; None without samples or with partial scores.
        change: run less base.
        interval: of the change; None as above.
        note: what the number of samples makes of the change; None when it is not known.
    """

    metric: str
    step: int
    base: float
    run: float
    samples: tuple[int | None, int | None]
    intervals: tuple[Interval | None, Interval | None]
    interval: Interval | None
    note: str | None

    @property
    def change(self) -> float:
        return self.run - self.base


def accuracies(
    base: RunData, run: RunData, window: Window, samples: int | None = None
) -> tuple[list[Accuracy], list[str]]:
    """Validations at matching steps of the window, ascending, and warnings about steps that only one run validated.

    Args:
        samples: of a validation, where neither metrics nor configuration say.
    """
    found, warnings = [], []
    environments = [n for n in base.series if n.startswith(f"{ACCURACY}/") and n in run.series]
    # Of one environment alone the accuracy is the overall one.
    both = ACCURACY in base.series and ACCURACY in run.series
    for name in [ACCURACY] * both + sorted(environments) * (len(environments) > 1 or not both):
        parts = window.cut(base.series[name]), window.cut(run.series[name])
        steps, left, right = np.intersect1d(parts[0].steps, parts[1].steps, return_indices=True)
        for step, i, j in zip(steps, left, right, strict=True):
            values = float(parts[0].values[i]), float(parts[1].values[j])
            if np.isfinite(values).all():
                counts = tuple(samples_of(each, name, int(step), samples) for each in (base, run))
                found.append(_accuracy(name, int(step), values, (counts[0], counts[1])))
        for own, other, each in ((parts[0], parts[1], base), (parts[1], parts[0], run)):
            alone = np.setdiff1d(own.steps, other.steps)
            if len(alone):
                warnings.append(f"{name}: step {ranges(alone)} validated by {each.name} only, not compared")
    return found, warnings


def _accuracy(name: str, step: int, values: tuple[float, float], samples: tuple[int | None, int | None]) -> Accuracy:
    n, m = samples
    if n is None or m is None:
        note = "the number of samples is not known: no interval"
        return Accuracy(name, step, *values, samples, (None, None), None, note)
    if not all(0 <= value <= 1 for value in values):
        return Accuracy(name, step, *values, samples, (None, None), None, "no share from 0 to 1: no interval")
    if not (is_share(values[0], n) and is_share(values[1], m)):
        return Accuracy(name, step, *values, samples, (None, None), None, "partial scores: no binomial interval")
    intervals = wilson(values[0] * n, n), wilson(values[1] * m, m)
    interval = newcombe(values[0], n, values[1], m)
    return Accuracy(name, step, *values, samples, intervals, interval, _in_samples(values[1] - values[0], n, m))


def _in_samples(change: float, n: int, m: int) -> str:
    if n != m:
        return f"{n} and {m} samples"
    count = round(abs(change) * n)
    return f"{100 * abs(change):.2f} points are {count} sample{'s'[: count != 1]} of {n}" if count else f"{n} samples"


def is_share(value: float, samples: int) -> bool:
    """Whether an accuracy can be that of so many samples scored 0 or 1."""
    count = value * samples
    return 0 <= value <= 1 and abs(count - round(count)) <= samples * _ROUNDING + 1e-9


def samples_of(run: RunData, metric: str, step: int, given: int | None) -> int | None:
    """Samples of a validation, from the metrics, as given, or from the configuration.

    Logged is only the count of all environments together.
    """
    if metric != ACCURACY:
        return None
    if (series := run.series.get(ACCURACY_SAMPLES)) is not None:
        at = np.searchsorted(series.steps, step)
        if at < len(series.steps) and series.steps[at] == step and 1 <= series.values[at] <= MOST_SAMPLES:
            return int(series.values[at])
    grpo: Any = (run.config or {}).get("grpo")
    configured = grpo.get("max_val_samples") if isinstance(grpo, dict) else None
    if given is not None:
        return given
    return configured if isinstance(configured, int) and 0 < configured <= MOST_SAMPLES else None
