"""`nemo-rl-moe report RUN`: one run as text, as JSON and as a page."""

from __future__ import annotations

import argparse
from pathlib import Path

from nemo_rl_moe.compare.command import RUN_HELP, STEPS_HELP, VALIDATION_SAMPLES_HELP, write_page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options besides --json."""
    parser.add_argument("run", type=Path, metavar="RUN", help=RUN_HELP)
    parser.add_argument("--steps", metavar="A-B", help=STEPS_HELP)
    parser.add_argument("--val-samples", type=int, metavar="N", help=VALIDATION_SAMPLES_HELP)
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write one self-contained page")


def run(arguments: argparse.Namespace) -> None:
    """Reads a run and prints its report.

    Raises:
        UserError: the run cannot be read, or arguments that do not fit.
    """
    from nemo_rl_moe.compare import as_json, report_text
    from nemo_rl_moe.compare.command import check_validation_samples
    from nemo_rl_moe.compare.one_run import report
    from nemo_rl_moe.compare.page import report_page
    from nemo_rl_moe.compare.read import read_run
    from nemo_rl_moe.compare.window import parse_window
    from nemo_rl_moe.printable import printable

    check_validation_samples(arguments.val_samples)
    window = None if arguments.steps is None else parse_window(arguments.steps)
    found = report(read_run(arguments.run), window, arguments.val_samples)
    if arguments.html is not None:
        write_page(arguments.html, report_page.document(found))
    if arguments.json:
        print(as_json.text(report_text.document(found)))
    else:
        print(printable("\n".join(report_text.lines(found))))
