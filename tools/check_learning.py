#!/usr/bin/env python3
"""Does a recipe learn? Runs it once for each seed and compares the mean reward of its first and last steps.

    python tools/check_learning.py [RECIPE] [--seeds 42 1 2] [--window 10] [--gain 0.3] [--minutes 5]

Prints one line for each seed and exits with 1 when one gains less than `--gain` or takes longer than `--minutes`, start
of all processes included.
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


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="?", type=Path, default=DEFAULT)
    parser.add_argument("--seeds", nargs="+", type=int, default=[42, 1, 2])
    parser.add_argument("--window", type=int, default=10, help="steps at each end")
    parser.add_argument("--gain", type=float, default=0.3, help="least gain in mean reward")
    parser.add_argument("--minutes", type=float, default=5.0, help="most time for one run")
    args = parser.parse_args()
    passed = True
    for seed in args.seeds:
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory(prefix="learning-") as folder:
            rewards, seconds = run(args.recipe.resolve(), seed, Path(folder) / args.recipe.stem)
        first, last = statistics.mean(rewards[: args.window]), statistics.mean(rewards[-args.window :])
        good = last - first >= args.gain and seconds <= 60 * args.minutes
        passed &= good
        print(
            f"seed {seed}: {len(rewards)} steps in {seconds:.0f} s, mean reward {first:.3f} (first {args.window}) to "
            f"{last:.3f} (last): {last - first:+.3f}, {'passed' if good else 'MISSED'}; load before {load:.1f}",
            flush=True,
        )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
