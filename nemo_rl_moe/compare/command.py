"""`nemo-rl-moe compare BASE RUN [RUN…]`: arguments, input, output."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_rl_moe.compare.window import Window

RUN_HELP = "run directory, W&B history (.csv, .json, .jsonl) or offline run, TensorBoard dump"
STEPS_HELP = "logged step numbers, both included; default: all after step 1"
VALIDATION_SAMPLES_HELP = "validation samples, where the runs do not say how many"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options besides --json."""
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help=f"baseline first: {RUN_HELP}")
    parser.add_argument("--suite", type=Path, metavar="DIR", help="a folder of pairs instead of RUN…: one summary")
    parser.add_argument("--steps", metavar="A-B", help=STEPS_HELP)
    parser.add_argument(
        "--treatment",
        action="append",
        default=[],
        metavar="NAME",
        help="what is meant to differ: dispatcher, placement, precision, … or a dotted key; may be repeated",
    )
    parser.add_argument("--val-samples", type=int, metavar="N", help=VALIDATION_SAMPLES_HELP)
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write one self-contained page")
    parser.add_argument("--markdown", action="store_true", help="Markdown for a pull request instead of the table")


def run(arguments: argparse.Namespace) -> None:
    """Compares and prints.

    Raises:
        UserError: runs that cannot be read, or arguments that do not fit.
    """
    from nemo_rl_moe.compare import matching
    from nemo_rl_moe.compare.window import parse_window
    from nemo_rl_moe.errors import UserError

    given = len(arguments.runs)
    if arguments.suite is not None and given:
        raise UserError("compare: expected either runs or --suite DIR")
    if arguments.suite is None and given < 2:
        raise UserError(f"compare: {given} run(s) given, expected a baseline and at least one other, or --suite DIR")
    check_validation_samples(arguments.val_samples)
    if arguments.json and arguments.markdown:
        raise UserError("--json --markdown: expected one of them")
    matching.check_treatment(arguments.treatment)
    window = None if arguments.steps is None else parse_window(arguments.steps)
    if arguments.suite is not None:
        _suite(arguments, window)
    else:
        _runs(arguments, window)


def _runs(arguments: argparse.Namespace, window: Window | None) -> None:
    from nemo_rl_moe.compare import as_json, markdown, text
    from nemo_rl_moe.compare.comparison import compare
    from nemo_rl_moe.compare.page import compare_page
    from nemo_rl_moe.compare.read import read_runs
    from nemo_rl_moe.printable import printable

    base, *others = read_runs(arguments.runs)
    pairs = compare(
        base, others, window=window, treatment=arguments.treatment, validation_samples=arguments.val_samples
    )
    if arguments.html is not None:
        write_page(arguments.html, compare_page.document(pairs))
    if arguments.json:
        print(as_json.text(as_json.document(pairs)))
    elif arguments.markdown:
        print(printable(markdown.text(pairs)), end="")
    else:
        print(printable("\n".join(text.lines(pairs))))


def _suite(arguments: argparse.Namespace, window: Window | None) -> None:
    from nemo_rl_moe.compare import as_json, suite, suite_text
    from nemo_rl_moe.compare.page import suite_page
    from nemo_rl_moe.printable import printable

    found = suite.read_suite(arguments.suite, window, arguments.treatment, arguments.val_samples)
    if arguments.html is not None:
        write_page(arguments.html, suite_page.document(found))
    if arguments.json:
        print(as_json.text(suite.document(found)))
    elif arguments.markdown:
        print(printable(suite_text.markdown_text(found)), end="")
    else:
        print(printable("\n".join(suite_text.lines(found))))


def check_validation_samples(count: int | None) -> None:
    """Raises a UserError for a number that no validation has."""
    from nemo_rl_moe.compare.accuracy import MOST_SAMPLES
    from nemo_rl_moe.errors import UserError

    if count is not None and not 1 <= count <= MOST_SAMPLES:
        raise UserError(f"--val-samples {count}: expected 1 to {MOST_SAMPLES}")


def write_page(path: Path, text: str) -> None:
    """Writes a page and says where, on stderr: stdout may be JSON.

    Raises:
        UserError: the file cannot be written.
    """
    from nemo_rl_moe.errors import UserError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--html {path}: cannot write ({error.strerror})") from error
    print(f"wrote {path}", file=sys.stderr)
