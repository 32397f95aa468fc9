"""Two long runs are compared in less than the time it takes to look up."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench import long_runs

REPO = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_two_runs_of_10000_steps_and_60_metrics_take_less_than_2_seconds_from_the_command_line(tmp_path: Path) -> None:
    command = long_runs.command(tmp_path, "--json")
    seconds = []
    # Seconds of a core, and the best of three: the machine that runs the tests has other work too.
    for _ in range(3):
        began = _core_seconds()
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": str(REPO)},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        seconds.append(_core_seconds() - began)
        if seconds[-1] < long_runs.LIMIT_S:
            break
    (pair,) = json.loads(done.stdout)["pairs"]
    assert pair["observations"] == long_runs.STEPS - 1 and all(
        row["interval"] for row in pair["metrics"] if row["kind"] == "mean"
    )
    assert min(seconds) < long_runs.LIMIT_S, seconds


def _core_seconds() -> float:
    """Of all processes that were started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_comparing_imports_neither_torch_nor_ray_nor_wandb() -> None:
    script = (
        "import sys; from nemo_rl_moe.compare import as_json, command, read, text; "
        "from nemo_rl_moe.compare.page import compare_page, report_page; "
        "from nemo_rl_moe.compare.watch import command, feed, views; "
        "print([m for m in ('torch', 'ray', 'wandb', 'vllm', 'pandas', 'pydantic', 'textual') if m in sys.modules])"
    )
    assert _printed(script) == "[]"


def test_the_command_line_of_compare_imports_no_schema_and_no_bench(tmp_path: Path) -> None:
    script = (
        "import sys; from nemo_rl_moe.cli import main; assert main(['compare', 'none', 'none']) == 2; "
        "print([m for m in sys.modules if m.startswith(('pydantic', 'torch', 'nemo_rl_moe.bench'))])"
    )
    assert _printed(script) == "[]"


def _printed(script: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()
