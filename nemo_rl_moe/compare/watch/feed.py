"""Reads a run again whenever its files have changed."""

from __future__ import annotations

import os
import time
from pathlib import Path

from nemo_rl_moe.compare.ending import is_held
from nemo_rl_moe.compare.read import read_run, wandb_logs
from nemo_rl_moe.compare.run_data import RunData
from nemo_rl_moe.errors import UserError

# Reading takes at most one part in so many of the time: a long log must not take a core from the run that writes it.
_SPARSE = 10
_LOG_BYTES = 32_768


class Feed:
    """A run as it is on disk now.

    Args:
        path: as for `read_run`.

    Attributes:
        run: as it was last read.
        error: why it could not be read since; None when it could.

    Raises:
        UserError: the path holds no run.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._name = Path(os.path.realpath(path)).name
        self._seen = self._signature(running=True)
        self.error: str | None = None
        self.run = self._read()

    def poll(self) -> bool:
        """Reads again when something has changed. Returns whether `run` or `error` may differ."""
        if time.monotonic() < self._not_before:
            return False
        seen = self._signature(running=self.run.ending.state == "running")
        if seen == self._seen:
            return False
        self._seen = seen
        try:
            self.run, self.error = self._read(), None
        except UserError as error:
            self.error = str(error)
        return True

    def log_tail(self) -> str:
        """The end of run.log; empty where there is none."""
        try:
            with (self._path / "run.log").open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - _LOG_BYTES))
                text = file.read().decode("utf-8", errors="replace")
        except OSError:
            return ""
        return text if size <= _LOG_BYTES else text.partition("\n")[2]

    def _read(self) -> RunData:
        began = time.monotonic()
        run = read_run(self._path, self._name)
        now = time.monotonic()
        self._not_before = now + _SPARSE * (now - began)
        return run

    def _signature(self, *, running: bool) -> tuple[object, ...]:
        """What changes when the run does. A run that is killed changes no file: it lets go of its directory."""
        names = ("metrics.jsonl", "manifest.json", "config.yaml", "run.log", "rollouts")
        files = [self._path, *(self._path / name for name in names)]
        if self._path.is_dir() and not (self._path / "manifest.json").is_file():
            files += wandb_logs(self._path)
        held = running and is_held(self._path / "run.log")
        return (held, *(_state(file) for file in files))


def _state(file: Path) -> tuple[int, ...] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
