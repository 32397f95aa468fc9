"""Runs the command line as a user does: a process of its own, in a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

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


def nemo_rl_moe(*args: str | Path, cwd: Path, timeout_s: float = 240, python_path: tuple[str, ...] = ()) -> Outcome:
    """Runs `python -m nemo_rl_moe ARGS` in `cwd`."""
    done = subprocess.run(
        [sys.executable, "-m", "nemo_rl_moe", *map(str, args)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPO), *python_path])},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def run_recipe(recipe: Path, run_dir: Path, *overrides: str, cwd: Path, timeout_s: float = 240) -> Outcome:
    """Runs a recipe with the repository's tiny model into `run_dir`."""
    return nemo_rl_moe(
        "run",
        recipe,
        f"logger.log_dir={run_dir}",
        f"policy.model_name={MODEL}",
        *overrides,
        cwd=cwd,
        timeout_s=timeout_s,
    )


def metrics(run_dir: Path) -> list[dict]:
    """Rows of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
