#!/usr/bin/env python3
"""Does a recipe learn? Runs it once for each seed and compares the mean reward of its first and last steps.

    python tools/check_learning.py [RECIPE] [--seeds 42 1 2] [--window 10] [--gain 0.3] [--minutes 5]
    python tools/check_learning.py RECIPE --as-well-as RECIPE [--within 0.05]

Prints one line for each seed and exits with 1 when one gains less than `--gain` or takes longer than `--minutes`, start
of all processes included. With `--as-well-as` it runs the second recipe too, seed by seed, and also exits with 1 when
the mean rewards of their last steps, over all seeds, are further apart than `--within`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
DEFAULT = REPOSITORY / "examples/configs/recipes/llm/grpo-tiny-moe-cpu.yaml"


def run(recipe: Path, seed: int, log_dir: Path) -> tuple[list[float], float]:
    """Mean reward of each step, and the seconds of the whole command.

    Raises:
        subprocess.CalledProcessError: the run failed; its output has been printed.
    """
    started = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "nemo_rl_moe", "run", recipe, f"grpo.seed={seed}", f"logger.log_dir={log_dir}"],
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    seconds = time.monotonic() - started
    rows = [json.loads(line) for line in (log_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["train/reward"] for row in rows], seconds


@dataclass(frozen=True)
class Result:
    """One run: mean reward of its first and its last steps, and the seconds of the whole command."""

    first: float
    last: float
    seconds: float


def measure(recipe: Path, seed: int, window: int) -> Result:
    """Runs the recipe and prints a line about it."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="learning-") as folder:
        rewards, seconds = run(recipe, seed, Path(folder) / recipe.stem)
    result = Result(statistics.mean(rewards[:window]), statistics.mean(rewards[-window:]), seconds)
    print(
        f"{recipe.stem}, seed {seed}: {len(rewards)} steps in {seconds:.0f} s, mean reward {result.first:.3f} (first "
        f"{window}) to {result.last:.3f} (last): {result.last - result.first:+.3f}; load before {load:.1f}",
        flush=True,
    )
    return result


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="?", type=Path, default=DEFAULT)
    parser.add_argument("--seeds", nargs="+", type=int, default=[42, 1, 2])
    parser.add_argument("--window", type=int, default=10, help="steps at each end")
    parser.add_argument("--gain", type=float, default=0.3, help="least gain in mean reward")
    parser.add_argument("--minutes", type=float, default=5.0, help="most time for one run")
    parser.add_argument("--as-well-as", type=Path, help="a second recipe, to compare with")
    parser.add_argument("--within", type=float, default=0.05, help="most difference of the final rewards")
    args = parser.parse_args()
    recipes = [path.resolve() for path in (args.recipe, args.as_well_as) if path]
    results: dict[Path, list[Result]] = {recipe: [] for recipe in recipes}
    for seed in args.seeds:
        for recipe in recipes:
            results[recipe].append(measure(recipe, seed, args.window))
    missed = sum(
        r.last - r.first < args.gain or r.seconds > 60 * args.minutes for runs in results.values() for r in runs
    )
    print(f"{missed} run(s) gained less than {args.gain} or took longer than {args.minutes:g} minutes")
    if len(recipes) == 2:
        final = [statistics.mean(r.last for r in results[recipe]) for recipe in recipes]
        apart = final[0] - final[1]
        print(f"final reward: {final[0]:.3f} and {final[1]:.3f}, {apart:+.3f} (goal: within {args.within})")
        missed += abs(apart) > args.within
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
