"""Our loop on a workload: `nemo-rl-moe run` as a user starts it, read from its metrics afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tools.bench.our_recipe import async_one_off, plain_recipe
from tools.bench.workloads import Workload

REPOSITORY = Path(__file__).resolve().parents[2]
_LIMIT_S = 1800


def run_loop(
    folder: Path, workload: Workload, *, threads: int, steps: int, warmup: int, split: bool = False
) -> dict[str, Any]:
    """Runs the workload's recipe in a child process.

    Args:
        split: async-1off on two devices of `threads` each, in place of sync on one.

    Returns:
        `steps`: one dict of `timing/train/*` seconds for each step after the warm-up; `response_lengths` of the
        first response to each prompt, which are the ones that a run writes down.
    """
    with tempfile.TemporaryDirectory(prefix="bench-loop-") as temporary:
        # A recipe whose name says async must be async, and the other way round.
        name = f"{workload.name}-async-1off" if split else workload.name
        log_dir = Path(temporary) / name
        recipe = plain_recipe(folder, workload, threads=threads, steps=warmup + steps, log_dir=log_dir)
        recipe["logger"]["num_rollout_samples"] = workload.num_prompts
        run_recipe(async_one_off(recipe) if split else recipe, Path(temporary) / f"{name}.yaml")
        return {
            "threads": threads,
            "samples_per_step": workload.samples,
            "steps": read_steps(log_dir / "metrics.jsonl", warmup),
            "response_lengths": read_response_lengths(log_dir / "rollouts", warmup),
        }


def run_recipe(recipe: dict[str, Any], path: Path) -> None:
    """Writes a recipe to `path` and runs it through the command line.

    Raises:
        RuntimeError: it failed, with the end of what it printed.
    """
    path.write_text(yaml.safe_dump(recipe))
    run_recipe_file(path)


def run_recipe_file(path: Path, overrides: Sequence[str] = ()) -> None:
    """Runs a recipe file through the command line.

    Raises:
        RuntimeError: it failed, with the end of what it printed.
    """
    # The verifier is imported by path in a process of its own.
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-m", "nemo_rl_moe", "run", str(path), *overrides],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{path.name} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def read_steps(path: Path, warmup: int) -> list[dict[str, float]]:
    """Phase seconds of each step after the warm-up, without the `timing/train/` of their names."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    prefix = "timing/train/"
    return [
        {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix)}
        for row in rows
        if row["step"] > warmup
    ]


def read_response_lengths(folder: Path, warmup: int) -> list[int]:
    """Response tokens of the written samples: every word is one token, and the end token is not written."""
    lengths = []
    for step in sorted(folder.glob("step_*.jsonl"), key=lambda p: int(p.stem.removeprefix("step_"))):
        if int(step.stem.removeprefix("step_")) <= warmup:
            continue
        for row in map(json.loads, step.read_text().splitlines()):
            lengths.append(len(row["response"].split()) + (0 if row["truncated"] else 1))
    return lengths


def share_of_other(steps: list[dict[str, float]]) -> list[float]:
    """Of each step, the share that is neither generation, log-probabilities, training nor weight sync."""
    core = ("generation", "policy_and_reference_logprobs", "policy_training", "weight_sync")
    return [1.0 - sum(step[name] for name in core) / step["total_step_time"] for step in steps]
