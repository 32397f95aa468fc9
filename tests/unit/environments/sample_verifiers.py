"""Verifiers that behave well and badly on request, for the tests of the pool."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def length(response: str, metadata: dict[str, Any]) -> float:
    """The reward is the response's length."""
    return len(response)


def obey(response: str, metadata: dict[str, Any]) -> Any:  # noqa: PLR0911, PLR0912
    """Does what the response's first word says; a plain number is the reward."""
    command, _, rest = response.partition(" ")
    match command:
        case "print":
            print(rest)
            print(rest, file=sys.stderr)
            subprocess.run(["echo", rest], check=True)
            return 1.0
        case "print-and-hang":
            print(rest)
            time.sleep(1000)
        case "hang":
            time.sleep(1000)
        case "spin":
            while True:
                pass
        case "exit":
            os._exit(3)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "raise":
            raise ValueError(rest)
        case "sys-exit":
            sys.exit(rest)
        case "sleep":
            time.sleep(float(rest))
            return 1.0
        case "nan":
            return float("nan")
        case "list":
            return [1.0, 0.0]
        case "huge-int":
            return 10**400
        case "huge":
            return 1e39
        case "none":
            return None
        case "numpy":
            return np.float32(0.25)
        case "true":
            return True
        case "problem":
            return float(metadata["problem"] == rest)
        case "pid":
            return float(os.getpid())
        case "modules":
            return float("torch" in sys.modules)
        case "child":
            child = subprocess.Popen(["sleep", "1000"])
            Path(rest).write_text(str(child.pid))
            time.sleep(1000)
    return float(command)


not_a_function = 3
