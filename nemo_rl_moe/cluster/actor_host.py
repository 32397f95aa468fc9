"""The Ray actor classes: each hosts a plain class, imported by path inside the worker process.

The driver never imports vLLM or Megatron, and the hosted classes know nothing of Ray, so tests can use them without it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import inspect
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_rl_moe.errors import UserError


class ActorHost:
    """Hosts one worker object and sends the process's output to a log file of its own."""

    def __init__(self, class_path: str, args: tuple[Any, ...], log_file: str | None, folder: str) -> None:
        if log_file is not None:
            _redirect_output(Path(log_file))
        faulthandler.enable()
        # A Ray that was up before has a folder of its own, and a recipe's paths are relative to the driver's. On other
        # hosts the folder may not exist; there a relative path is then reported as missing.
        with contextlib.suppress(OSError):
            os.chdir(folder)
        module, _, name = class_path.rpartition(".")
        self._worker = getattr(importlib.import_module(module), name)(*args)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Runs a method of the hosted worker. What it raises reaches the driver, and with its traceback the log."""
        with _errors_in_log():
            return getattr(self._worker, method)(*args, **kwargs)

    def pid(self) -> int:
        """Process id of the worker."""
        return os.getpid()


class AsyncActorHost(ActorHost):
    """Hosts a worker whose methods are coroutines, so that many calls are under way at once."""

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Runs a method of the hosted worker, a coroutine or not."""
        result = super().call(method, *args, **kwargs)
        if not inspect.isawaitable(result):
            return result
        with _errors_in_log():
            return await result


@contextlib.contextmanager
def _errors_in_log() -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception:
        with contextlib.suppress(OSError):  # the log may be on the full disk that is the error
            traceback.print_exc()
        raise


def _redirect_output(path: Path) -> None:
    """File descriptors, not sys.stdout: C++ libraries print too, and their last words matter most."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
