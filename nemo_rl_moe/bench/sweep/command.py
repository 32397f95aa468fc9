"""`nemo-rl-moe bench sweep RECIPE`: a recipe's neighbours, checked, ranked, and run or submitted."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from nemo_rl_moe.bench.sweep import plan
from nemo_rl_moe.bench.sweep.expand import Sweep
from nemo_rl_moe.bench.sweep.rank import rank
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.load import load_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="YAML recipe with benchmark.sweep")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="such as benchmark.sweep.combine=single")
    parser.add_argument("--top", type=int, default=20, metavar="N", help="points to print (default 20)")
    parser.add_argument(
        "--measured", type=float, metavar="TFLOPS", help="what the base reached: predictions are scaled to it"
    )


def run(arguments: argparse.Namespace) -> None:
    """Plans.

    Raises:
        UserError: a wrong recipe, axis or option.
    """
    if arguments.top < 1:
        raise UserError(f"--top {arguments.top}: expected 1 or more")
    if arguments.measured is not None and not arguments.measured > 0:
        raise UserError(f"--measured {arguments.measured:g}: expected TFLOP/s/GPU above 0")
    sweep = Sweep(load_recipe(arguments.recipe, arguments.overrides))
    ranking = rank(sweep)
    if arguments.json:
        print(json.dumps(plan.as_dict(sweep, ranking, arguments.measured), indent=1))
    else:
        print("\n".join(plan.lines(sweep, ranking, arguments.top, arguments.measured)))
