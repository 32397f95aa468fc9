"""The commands of `nemo-rl-moe bench` on training throughput. None needs torch or Ray unless it trains."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def add_commands(commands: Any) -> None:
    """Adds every command to the sub-parsers of `bench`."""
    from nemo_rl_moe.bench.flops import command as flops
    from nemo_rl_moe.bench.memory import command as memory
    from nemo_rl_moe.bench.references import command as references
    from nemo_rl_moe.bench.references import gap_command as gap
    from nemo_rl_moe.bench.sweep import command as sweep

    _add(commands, "flops", flops, "model FLOPs term by term; tokens/s, TFLOP/s, step time and utilisation")
    _add(commands, "memory", memory, "memory of a recipe's GPUs, term by term for each pipeline stage")
    _add(commands, "references", references, "published training speeds, with sources and caveats")
    _add(commands, "sweep", sweep, "a recipe's neighbours: checked, ranked by predicted speed, run or submitted")
    _add(commands, "gap", gap, "one's own speed against published ones, with power and traffic")


def _add(commands: Any, name: str, module: Any, summary: str) -> None:
    """Adds one: a module with `add_arguments(parser)` and `run(arguments)`."""
    parser = commands.add_parser(name, help=summary)
    module.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout and nothing else")
    parser.set_defaults(command=_exit_code(module.run))


def _exit_code(run: Callable[[argparse.Namespace], int | None]) -> Callable[[argparse.Namespace], int]:
    return lambda arguments: run(arguments) or 0
