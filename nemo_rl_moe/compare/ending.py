"""How a run of ours ended: its manifest, and the causes that the reports tell apart."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_rl_moe.compare.run_data import Ending

# The first that matches counts. Memory comes before the rest: a process that the kernel or Ray ends for want of memory
# is dead too, and what others then wait for times out.
_CAUSES = (
    (
        "out of memory",
        r"out of memory|outofmemory|\boom\b|memory pressure|running low on memory|cannot allocate memory|"
        r"no available memory for the cache blocks|\bmemoryerror\b",
    ),
    (
        "time-out",
        r"timed? ?-?out|phasetimeout|no answer from|watchdog|deadline exceeded|due to time limit",
    ),
    ("killed", r"\bsigkill\b|\bsigterm\b|\bkilled\b|workerdied|actordied|\bdied\b|\bis gone\b|preempt"),
)
_REASON_LENGTH = 200


def cause_of(reason: str) -> str | None:
    """The cause that a message names; None when it names none of them."""
    for cause, pattern in _CAUSES:
        if re.search(pattern, reason, re.IGNORECASE):
            return cause
    return None


def ending_of(manifest: Mapping[str, Any], planned_steps: int | None, folder: Path) -> Ending:
    """How the run of a manifest ended.

    Args:
        manifest: contents of manifest.json.
        planned_steps: `grpo.max_num_steps`.
        folder: the run directory; asked whether the run still goes on when the manifest has no end.
    """
    code, reason = manifest.get("exit_code"), _one_line(str(manifest.get("reason") or ""))
    if code is None:
        if is_held(folder / "run.log"):
            return Ending("running", None, None, planned_steps)
        return Ending("killed", "killed", "the manifest has no end: the process was ended from outside", planned_steps)
    if code == 0:
        return Ending("done", None, None, planned_steps)
    if code == 130:
        return Ending("interrupted", "interrupted", "by Ctrl-C, SIGTERM or the job scheduler", planned_steps)
    # The whole text, not its first line: the end of a worker's log comes last, and that is where the cause stands.
    return Ending(
        "failed", cause_of(str(manifest.get("reason"))) or "error", reason or f"exit code {code}", planned_steps
    )


def is_held(log: Path) -> bool:
    """Whether a process holds the run directory now. A copy on another host is never held."""
    try:
        descriptor = os.open(log, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _one_line(text: str) -> str:
    line = " ".join(text.splitlines()[:1]).strip()
    return line if len(line) <= _REASON_LENGTH else line[: _REASON_LENGTH - 1] + "…"
