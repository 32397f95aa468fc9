"""Whether a run has the steps that are compared, and finite numbers in them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nemo_rl_moe.compare.run_data import RunData
from nemo_rl_moe.compare.window import Window, ranges


@dataclass(frozen=True)
class Health:
    """What is wrong with a run.

    Attributes:
        run: the run.
        window: the steps looked at.
        missing: int64 [N], steps of the window that the run did not log.
        nonfinite: steps of the window at which a metric was NaN or infinite, by metric.
        checked: number of metrics looked at.
    """

    run: RunData
    window: Window
    missing: NDArray[np.int64]
    nonfinite: dict[str, NDArray[np.int64]]
    checked: int

    @property
    def blocked(self) -> bool:
        """Whether the window cannot be compared."""
        return len(self.missing) > 0

    @property
    def problems(self) -> list[str]:
        """One sentence each; empty for a run that is whole."""
        found = list(self.run.flaws)
        if (early := self.early_end()) is not None:
            found.append(early)
        if self.blocked:
            have = len(self.window) - len(self.missing)
            found.append(f"{have} of {len(self.window)} steps logged; missing {ranges(self.missing)}")
        found += [f"{name} is not finite at step {ranges(steps)}" for name, steps in self.nonfinite.items()]
        return found

    def early_end(self) -> str | None:
        """How the run ended, unless it is done with all of its steps or says nothing of its end."""
        ending, steps = self.run.ending, self.run.training_steps
        last = int(steps[-1]) if len(steps) else 0
        of = f" of {ending.planned_steps}" if ending.planned_steps else ""
        if ending.state in ("done", "unknown"):
            if ending.planned_steps is None or last >= ending.planned_steps:
                return None
            known = "ended" if ending.state == "done" else "the last step logged is"
            return (
                f"{known} at step {last}{of}, with no cause given" if ending.state == "done" else f"{known} {last}{of}"
            )
        if ending.state == "running":
            return f"still running, at step {last}{of}"
        reason = f": {ending.reason}" if ending.reason else ""
        return f"ended at step {last}{of} ({ending.cause}){reason}"


def check(run: RunData, window: Window) -> Health:
    """Looks through every metric of a run."""
    missing = np.setdiff1d(window.steps, run.training_steps)
    nonfinite = {}
    for name, series in run.series.items():
        part = window.cut(series)
        bad = part.steps[np.isnan(part.values)]
        if len(bad):
            nonfinite[name] = bad
    return Health(run, window, missing, nonfinite, len(run.series))
