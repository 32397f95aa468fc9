#!/usr/bin/env python3
"""Does the placement simulator foretell real runs? Measures sync runs, predicts async-1off from them, and runs that.

    python tools/check_placement.py [--steps 30] [--within 0.1] [--write]

Two sync runs on one core, at one and two loads of generation, give the workload. From it alone the step times of
async-1off on one core each are simulated, at both loads, and then measured. Prints one row for each run and exits with
1 when a simulated step time is further off than `--within`. `--write` puts the table into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from nemo_rl_moe.bench.placement import measured  # noqa: E402
from nemo_rl_moe.bench.placement.measured import Check, MeasuredRun  # noqa: E402
from tools.bench import our_side, report, workloads  # noqa: E402
from tools.bench.our_recipe import async_one_off, plain_recipe  # noqa: E402
from tools.bench.workloads import Workload  # noqa: E402

ROOT = REPOSITORY / ".build/bench"
WARMUP = 3


def run(workload: Workload, folder: Path, steps: int, *, split: bool) -> MeasuredRun:
    """One run of the workload on one core (sync) or on one core each (async-1off), read back.

    Raises:
        RuntimeError: it failed.
    """
    made = workloads.make(workloads.BALANCED_VARIED, ROOT)
    name = f"{workload.num_prompts}-prompts-{'async-1off' if split else 'sync'}"
    print(f"measuring {name} (load {report.load_average():.1f})", file=sys.stderr, flush=True)
    recipe = plain_recipe(made, workload, threads=1, steps=WARMUP + steps, log_dir=folder / name)
    # Every response's length is known from its text.
    recipe["logger"]["num_rollout_samples"] = workload.samples
    # Sync does the same passes as async, so that training costs the same.
    recipe["loss_fn"] |= {"use_importance_sampling_correction": True}
    our_side.run_recipe(async_one_off(recipe) if split else recipe, folder / f"{name}.yaml")
    return measured.read_run(folder / name, skip=WARMUP)


def table(sync: list[Check], ahead: list[Check], steps: int) -> str:
    """Markdown with the conditions."""
    rows = ["| run | measured step | simulated | error | what the simulation knew |", "|---|---|---|---|---|"]
    for checks, known in ((sync, "this run"), (ahead, "the two sync runs")):
        for check in checks:
            seconds = f"{check.measured_step_s:.3f} s | {check.simulated.step_s:.3f} s"
            rows.append(f"| {Path(check.run).name} | {seconds} | {check.error:+.1%} | {known} |")
    return f"{report.machine()}. {steps} steps each after {WARMUP}.\n\n" + "\n".join(rows)


def main() -> int:
    """Command line. Returns 1 when an error is larger than allowed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30, help="measured steps of each run")
    parser.add_argument("--within", type=float, default=0.1, help="largest relative error of a step time")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    args = parser.parse_args()
    loads = [replace(workloads.BALANCED_VARIED, num_prompts=n) for n in (4, 8)]
    with tempfile.TemporaryDirectory(prefix="check-placement-") as temporary:
        sync = [run(load, Path(temporary), args.steps, split=False) for load in loads]
        ahead = [run(load, Path(temporary), args.steps, split=True) for load in loads]
        workload = measured.measured_workload(sync)
        checks = [measured.check_runs(runs, workload) for runs in (sync, ahead)]
    text = table(*checks, args.steps)
    print(text)
    if args.write:
        report.write_into(REPOSITORY / "docs/benchmarks.md", "placement-simulator", text)
    return 0 if all(abs(c.error) <= args.within for group in checks for c in group) else 1


if __name__ == "__main__":
    sys.exit(main())
