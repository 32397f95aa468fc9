"""Times the recipe tools on this machine: `python tools/bench_recipes.py`. Prints the rows of docs/benchmarks.md."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
CONFIGS = REPO / "examples/configs"
ONE = CONFIGS / "recipes/llm/performance/grpo-qwen3-235b-32n4g-async-1off-mxfp8-rollout.yaml"
PLAN_ALL = """
import sys
from pathlib import Path
from nemo_rl_moe.recipe.compose import FileCache
from nemo_rl_moe.recipe.load import load_recipe
from nemo_rl_moe.recipe.plan import plan
cache = FileCache()
for path in sorted(Path(sys.argv[1]).rglob("*.yaml")):
    plan(load_recipe(path, cache=cache).recipe)
"""


def timed(*arguments: str, repeats: int = 5) -> tuple[float, float]:
    """Median wall and CPU seconds of a process, its start included."""
    env = os.environ | {"PYTHONPATH": str(REPO)}
    wall, busy = [], []
    for _ in range(repeats):
        started, before = time.perf_counter(), os.times()
        subprocess.run([sys.executable, *arguments], env=env, check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        wall.append(time.perf_counter() - started)
        busy.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return statistics.median(wall), statistics.median(busy)


def main() -> None:
    """Prints the table."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    count = len(list(CONFIGS.rglob("*.yaml")))
    rows = [
        ("`validate` of one recipe", timed("-m", "nemo_rl_moe", "validate", str(ONE)), 1.5),
        (f"all {count} recipes validated and planned", timed("-c", PLAN_ALL, str(CONFIGS)), 5.0),
        ("`plan` with one override", timed("-m", "nemo_rl_moe", "plan", str(ONE), "grpo.seed=1"), None),
    ]
    print("| what, process start included, one core | wall s | CPU s | limit, wall s |\n|---|---|---|---|")
    for name, (wall, busy), limit in rows:
        print(f"| {name} | {wall:.2f} | {busy:.2f} | {limit or ''} |")


if __name__ == "__main__":
    main()
