"""Where the time of a run's steps went: parts that add up to the step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nemo_rl_moe.compare.run_data import RunData

# Phases of the driver. Generation that runs ahead of the trainer costs a step only what the step waited for it.
_PARTS = (
    ("generation", ("exposed_generation",)),
    ("log-probabilities", ("policy_and_reference_logprobs",)),
    ("policy training", ("policy_training",)),
    ("refit", ("weight_sync",)),
    ("validation and checkpoints", ("validation", "checkpointing")),
)
SCORING, OTHER = "scoring and data", "other"
LABELS = (*(label for label, _ in _PARTS), SCORING, OTHER)


class Split(NamedTuple):
    """Steps and their parts.

    Attributes:
        steps: int64 [N], those with a step time.
        seconds: float64 [N], of the whole step.
        parts: float64 [N] seconds by label, in the order of a step; parts that are 0 throughout are left out. They add
            up to `seconds`, or to more where a source times phases that overlap.
    """

    steps: NDArray[np.int64]
    seconds: NDArray[np.float64]
    parts: dict[str, NDArray[np.float64]]


@np.errstate(all="ignore")
def split(run: RunData) -> Split:
    """The parts of each step of a run, ours or NeMo-RL's."""
    total = run.series.get("timing/train/total_step_time")
    if total is None or not (good := np.isfinite(total.values)).any():
        return Split(np.zeros(0, dtype=np.int64), np.zeros(0), {})
    steps, seconds = total.steps[good], total.values[good]
    exposed = "timing/train/exposed_generation" in run.series
    parts = {
        label: sum(
            (_at(run, name if exposed or label != "generation" else "generation", steps) for name in names),
            np.zeros(len(steps)),
        )
        for label, names in _PARTS
    }
    rest = np.maximum(0.0, seconds - np.sum(list(parts.values()), axis=0))
    if "timing/train/other" in run.series:
        # Scoring and data of samples that were made ahead ran beside the step. What is neither a phase nor `other` is
        # the driver's own share of them.
        parts[OTHER] = np.minimum(rest, _at(run, "other", steps))
        parts[SCORING] = rest - parts[OTHER]
    else:
        parts[SCORING] = np.minimum(rest, _at(run, "reward", steps) + _at(run, "data", steps))
        parts[OTHER] = rest - parts[SCORING]
    # A rest of rounding is no part.
    kept = {label: parts[label] for label in LABELS if parts[label].sum() > 1e-6 * seconds.sum()}
    return Split(steps, seconds, kept)


def _at(run: RunData, phase: str, steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """Seconds of a phase at each step; 0 where it did not run."""
    series = run.series.get(f"timing/train/{phase}")
    found = np.zeros(len(steps))
    if series is not None:
        _, ours, theirs = np.intersect1d(steps, series.steps, assume_unique=True, return_indices=True)
        found[ours] = np.nan_to_num(series.values[theirs])
    return found
