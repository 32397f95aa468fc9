"""Signs that a run's numbers can no longer be trusted, told once when they appear."""

from __future__ import annotations

import statistics
from collections import deque

_WINDOW = 20


class HealthGate:
    """Watches how far generator and trainer are apart on the same tokens.

    `train/token_mult_prob_error` is the mean of exp|generation - training log-probability|: 1 where both agree. A
    single step may stray; a median above the limit means that the two compute different models, or that samples are
    older than the importance correction can make up for.

    Args:
        limit: `grpo.token_mult_prob_error_warning`.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._values: deque[float] = deque(maxlen=_WINDOW)
        self._warned = False
        self._told_no_gradient = False

    def no_gradient(self, why: str | None) -> str | None:
        """Takes in why a step cannot move the policy, None if it can. Returns what to tell the user, once in a run.

        A policy that has learned its task has many such steps; their share is in the metrics.
        """
        if why is None or self._told_no_gradient:
            return None
        self._told_no_gradient = True
        return f"{why}; train/zero_std_fraction and train/grad_norm show further steps like this one"

    def observe(self, error: float) -> str | None:
        """Takes in a step's value. Returns what to tell the user when the median begins to be above the limit."""
        self._values.append(error)
        median = statistics.median(self._values)
        begins = median > self._limit and not self._warned
        self._warned = median > self._limit
        if not begins:
            return None
        return (
            f"the median of train/token_mult_prob_error over the last {len(self._values)} step(s) is {median:.3f}, "
            f"above grpo.token_mult_prob_error_warning of {self._limit:g}: generator and trainer give the same tokens "
            "different probabilities"
        )
