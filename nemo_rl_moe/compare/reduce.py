"""How the steps of a window become one number of a run."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nemo_rl_moe.compare.names import TOKENS, Row
from nemo_rl_moe.compare.run_data import RunData
from nemo_rl_moe.compare.window import Window, ranges


def gaps(run: RunData, metric: str, window: Window) -> str | None:
    """Why a metric's mean over the window cannot be taken; None when it can."""
    if metric not in run.series:
        return f"{run.name} does not log {metric}"
    part = window.cut(run.series[metric])
    if len(part.steps) < len(window):
        return f"{run.name} logged {metric} at {len(part.steps)} of {len(window)} steps"
    bad = part.steps[np.isnan(part.values)]
    return f"{run.name}: not finite at step {ranges(bad)}" if len(bad) else None


def work(run: RunData, row: Row, window: Window) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Tokens and seconds of each step of the window, over one device, for a rate that is logged at all of them.

    Tokens of a step are its rate x its seconds. Where the seconds are not logged they are tokens / rate, in a unit that
    cancels in the quotient. None where neither is logged.
    """
    rate = window.cut(run.series[row.metric]).values
    if row.seconds is not None and gaps(run, row.seconds, window) is None:
        seconds = window.cut(run.series[row.seconds]).values
    elif gaps(run, TOKENS, window) is None and np.all(rate > 0):
        seconds = window.cut(run.series[TOKENS]).values / rate
    else:
        return None
    return rate * seconds, seconds


def largest(run: RunData, metric: str, window: Window) -> float | None:
    """Of all steps up to the window's end: a peak before the window is a peak too."""
    if metric not in run.series:
        return None
    steps, values = run.series[metric]
    values = values[(steps <= window.last) & ~np.isnan(values)]
    return float(values.max()) if len(values) else None
