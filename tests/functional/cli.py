"""Runs the command line as a user does, in a process of its own or, to save its start, in the tests' process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_moe.cli import main
from tests.shared_ray import ensure_ray

REPO = Path(__file__).resolve().parents[2]
RECIPES = REPO / "examples/configs/recipes/llm"
TINY = RECIPES / "grpo-tiny-moe-cpu.yaml"
MODEL = REPO / "models/tiny-moe-cpu"


@dataclass
class Outcome:
    """What a command left behind."""

    code: int
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        return self.stdout + self.stderr


def nemo_rl_moe(*args: str | Path, cwd: Path, timeout_s: float = 240) -> Outcome:
    """Runs `python -m nemo_rl_moe ARGS` in `cwd`, in a process and with a Ray of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "nemo_rl_moe", *map(str, args)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def here(*args: str | Path, cwd: Path) -> Outcome:
    """Runs `nemo-rl-moe ARGS` in `cwd` and this process. It connects to the tests' Ray if that is up."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(a) for a in args])
    return Outcome(code, out.getvalue(), err.getvalue())


def run_recipe(recipe: Path, run_dir: Path, *overrides: str, cwd: Path) -> Outcome:
    """Runs a recipe with the repository's tiny model into `run_dir`, on the tests' Ray."""
    ensure_ray()
    return here("run", recipe, f"logger.log_dir={run_dir}", f"policy.model_name={MODEL}", *overrides, cwd=cwd)


def metrics(run_dir: Path) -> list[dict]:
    """Rows of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
