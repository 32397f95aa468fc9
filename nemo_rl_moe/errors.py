"""Errors that a user can cause, kept apart from faults of ours."""

from __future__ import annotations


class UserError(Exception):
    """The user's input is wrong: the CLI prints the message without a traceback and exits with 2.

    The message names the file and line or the dotted path, the value, and what was expected.
    """


class RunFailed(RuntimeError):
    """A run cannot go on, for a reason that its message explains: the CLI prints it without a traceback, exit code 1.

    Anything else that ends a run is a fault that nobody foresaw, and is shown with its traceback.
    """


class PhaseTimeout(RunFailed):
    """Something that was waited for did not answer in time.

    Args:
        phase: what was waited for, such as ``"refit: update_weights"``.
        who: the rank or worker that was waited for, such as ``"generation worker 0"``.
        limit_s: the limit in seconds that was passed.
    """

    def __init__(self, phase: str, who: str, limit_s: float) -> None:
        super().__init__(f"{phase}: no answer from {who} within {limit_s:g} s")
        self.phase = phase
        self.who = who
        self.limit_s = limit_s

    def __reduce__(self) -> tuple[type[PhaseTimeout], tuple[str, str, float]]:
        return (PhaseTimeout, (self.phase, self.who, self.limit_s))
