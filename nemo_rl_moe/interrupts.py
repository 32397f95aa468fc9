"""SIGINT, SIGTERM and SIGHUP end a run in the same clean way, at whichever moment they come.

A user sends SIGINT, a job scheduler SIGTERM, a terminal that closes SIGHUP. What a signal does depends on what there
is to clean up: nothing yet, and the process ends at once; a run, and `KeyboardInterrupt` unwinds it; a clean-up under
way, and the signal is dropped, because the end is near and a clean-up cut off would leave processes behind.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from nemo_rl_moe import limits

EXIT_INTERRUPTED = 130


class _Stage(enum.Enum):
    NOTHING_TO_CLEAN_UP = enum.auto()
    RUNNING = enum.auto()
    CLEANING_UP = enum.auto()


class _State:
    """Of the process, as signal handlers are."""

    stage = _Stage.NOTHING_TO_CLEAN_UP
    held = False
    pending = False
    raised_at = -math.inf


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Takes the three signals over for the block, from the main thread.

    SIGINT gets a handler even where it is ignored, as a shell starts background jobs; SIGHUP does not, because nohup
    ignores it on purpose.
    """
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    _State.stage, _State.held, _State.pending = _Stage.NOTHING_TO_CLEAN_UP, False, False
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        # The interpreter's own end takes a moment with all that is loaded, and the exit code is decided.
        atexit.register(_ignore, *numbers)


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """In the block a signal raises `KeyboardInterrupt`; from its end on, however it came, signals are dropped."""
    _State.stage, _State.raised_at = _Stage.RUNNING, -math.inf
    try:
        yield
    finally:
        _State.stage = _Stage.CLEANING_UP


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Puts a signal off to the end of the block, for what cannot be cut off. A second one does not wait."""
    _State.held = True
    try:
        yield
    finally:
        _State.held = False
        pending, _State.pending = _State.pending, False
    if pending and _State.stage is _Stage.RUNNING:
        _raise()


def handle(_number: int, _frame: FrameType | None) -> None:
    """The handler of all three."""
    if _State.stage is _Stage.NOTHING_TO_CLEAN_UP:
        # Raised in the middle of an import, an exception may turn into another one, or be lost.
        with contextlib.suppress(OSError):
            print("interrupted", file=sys.stderr, flush=True)
        os._exit(EXIT_INTERRUPTED)
    if _State.stage is _Stage.CLEANING_UP:
        return
    if _State.held and not _State.pending:
        _State.pending = True
    elif time.monotonic() - _State.raised_at > limits.SIGNAL_REPEAT_S:
        _raise()


def _ignore(*numbers: signal.Signals) -> None:
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def _raise() -> NoReturn:
    _State.raised_at = time.monotonic()
    raise KeyboardInterrupt
