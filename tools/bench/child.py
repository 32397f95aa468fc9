"""A benchmark in a process of its own that prints its result as one line of JSON."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

_LIMIT_S = 1800
_REPOSITORY = Path(__file__).resolve().parents[2]


def run_child(command: list[str], *, threads: int, name: str) -> dict[str, Any]:
    """Runs a benchmark process and returns the JSON object that it prints as its last line of this kind.

    Raises:
        RuntimeError: it failed, with the end of what it printed.
    """
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": str(_REPOSITORY),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not found:
        raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(found[-1])
