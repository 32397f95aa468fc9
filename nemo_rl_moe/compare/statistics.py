"""Intervals: a paired bootstrap for means over steps, and binomial intervals for accuracies.

Bootstrap. Steps are drawn with replacement, the same steps for both runs and for all metrics, so what both runs share
at a step (its prompts, its validation) cancels. Neighbouring steps resemble one another, so blocks of n^(1/3) steps are
drawn instead of single ones (Künsch 1989; circular, Politis and Romano 1992). The percentile interval is widened for
few blocks by Student's t (Hesterberg 2015, "expanded percentile"). Measured: of 95 % intervals over 19 steps, 95 % hold
the true mean when steps are independent, 90 % at a correlation of 0.3 between neighbours, 82 % at 0.6.

Accuracies. Wilson's score interval for one, Newcombe's (1998, method 10) for the difference of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

LEVEL = 0.95
# With fewer steps there are fewer than three blocks, and Student's t has no useful width left.
MIN_STEPS = 5
_SEED = 20260204
_MANY_STEPS = 1000
_CHUNK = 64


class Interval(NamedTuple):
    """A confidence interval at `LEVEL`."""

    low: float
    high: float

    @property
    def spans_zero(self) -> bool:
        """Whether no difference lies within it."""
        return self.low <= 0 <= self.high


class Bootstrap:
    """Means of every series over the same resampled steps.

    Args:
        values: float64 [n, m], m series over n steps, all finite.

    Attributes:
        means: float64 [B, m], the series' means in each of B resamples.
    """

    def __init__(self, values: FloatArray) -> None:
        steps = len(values)
        self.steps = steps
        if steps < MIN_STEPS:
            self.means = np.zeros((0, values.shape[1]))
            return
        block = max(1, round(steps ** (1 / 3)))
        blocks = math.ceil(steps / block)
        resamples = 4000 if steps <= _MANY_STEPS else 1000
        # Means of all circular blocks from one running sum; a resample is then a mean of a few of these.
        wrapped = np.concatenate([np.zeros((1, values.shape[1])), values, values[: block - 1]])
        sums = np.cumsum(wrapped, axis=0)
        block_means = (sums[block:] - sums[:-block]) / block
        random = np.random.default_rng(_SEED)
        parts = []
        for start in range(0, resamples, _CHUNK):
            drawn = random.integers(0, steps, size=(min(_CHUNK, resamples - start), blocks))
            parts.append(block_means[drawn].mean(axis=1))
        self.means = np.concatenate(parts)
        self._tail = _tail_share(blocks)

    def interval(self, statistic: Callable[[FloatArray], FloatArray]) -> Interval | None:
        """Interval of a statistic of the means; None with too few steps or where it is undefined.

        Args:
            statistic: float64 [B, m] means -> float64 [B].
        """
        if len(self.means) == 0:
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            values = statistic(self.means)
        if not np.all(np.isfinite(values)):
            return None
        low, high = np.quantile(values, [self._tail, 1 - self._tail])
        return Interval(float(low), float(high))


def _tail_share(blocks: int) -> float:
    """Share of resamples to leave out at each end."""
    return NormalDist().cdf(-math.sqrt(blocks / (blocks - 1)) * student_t((1 + LEVEL) / 2, blocks - 1))


def student_t(probability: float, freedom: int) -> float:
    """Quantile of Student's t by the expansion in 1/freedom (Abramowitz and Stegun 26.7.5); within 1 % from 3 on."""
    z, n = NormalDist().inv_cdf(probability), freedom
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4)
    )


def wilson(successes: float, samples: int) -> Interval:
    """Interval of a share of independent samples."""
    z, share = NormalDist().inv_cdf((1 + LEVEL) / 2), successes / samples
    centre = (share + z * z / (2 * samples)) / (1 + z * z / samples)
    half = z * math.sqrt(share * (1 - share) / samples + z * z / (4 * samples**2)) / (1 + z * z / samples)
    return Interval(max(0.0, centre - half), min(1.0, centre + half))


def newcombe(before: float, samples_before: int, after: float, samples_after: int) -> Interval:
    """Interval of the difference of two shares, after less before.

    The two runs usually score the same prompts. Which of them each got right is not logged, so the shares count as
    independent, which makes the interval wider than a paired one.
    """
    first, second = wilson(before * samples_before, samples_before), wilson(after * samples_after, samples_after)
    low = math.hypot(after - second.low, first.high - before)
    high = math.hypot(second.high - after, before - first.low)
    return Interval(after - before - low, after - before + high)
