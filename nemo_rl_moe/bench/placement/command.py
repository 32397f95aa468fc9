"""`nemo-rl-moe bench placement RECIPE`: arguments, input, output."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options; recipe, overrides and --json are common to all commands."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--workload", type=Path, metavar="FILE", help="lengths, speeds and times of a step, as YAML")
    source.add_argument(
        "--from-run", type=Path, action="append", metavar="RUN_DIR", help="measure them in a run; may be repeated"
    )
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps simulated (default 20)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the response lengths (default 0)")


def run(arguments: argparse.Namespace) -> None:
    """Simulates and prints.

    Raises:
        UserError: wrong recipe, workload or run directory, or ones that do not fit together.
    """
    from nemo_rl_moe.bench.placement import measured, report
    from nemo_rl_moe.bench.placement.predict import predict
    from nemo_rl_moe.bench.placement.simulate import Steps
    from nemo_rl_moe.bench.placement.workload import load_workload
    from nemo_rl_moe.errors import UserError
    from nemo_rl_moe.recipe.load import load_recipe

    if arguments.steps < 1 or arguments.seed < 0:
        raise UserError(f"--steps {arguments.steps} --seed {arguments.seed}: expected at least 1 and 0")
    loaded, steps = load_recipe(arguments.recipe, arguments.overrides), Steps(arguments.steps, seed=arguments.seed)
    if arguments.workload is not None:
        workload, name, checks = load_workload(arguments.workload), str(arguments.workload), []
    else:
        runs = [measured.read_run(path) for path in arguments.from_run]
        for item in runs:
            measured.require_same_devices(loaded.recipe, item.recipe, str(item.path))
        workload, name = measured.measured_workload(runs), "measured in " + ", ".join(map(str, arguments.from_run))
        checks = measured.check_runs(runs, workload, steps)
    prediction = predict(loaded.recipe, workload, steps)
    if arguments.json:
        print(json.dumps(report.as_dict(loaded.name, name, prediction, checks), indent=1))
    else:
        print("\n".join(report.lines(loaded.name, name, prediction, checks)))
