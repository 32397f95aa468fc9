"""`nemo-rl-moe watch RUN`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from nemo_rl_moe.compare.command import RUN_HELP


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("run", type=Path, metavar="RUN", help=RUN_HELP)


def run(arguments: argparse.Namespace) -> None:
    """Shows the run until the user has seen enough.

    Raises:
        UserError: no run there, no terminal, or the textual package is missing.
    """
    from nemo_rl_moe.compare.watch.feed import Feed
    from nemo_rl_moe.errors import UserError

    feed = Feed(arguments.run)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError(f"watch: not a terminal; `nemo-rl-moe report {arguments.run}` prints the same once")
    try:
        from nemo_rl_moe.compare.watch.app import WatchApp
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "textual":
            raise
        raise UserError("watch: needs the textual package (pip install textual)") from error
    WatchApp(feed).run()
