"""`nemo-rl-moe bench references`: the table of results with sources and caveats."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from nemo_rl_moe.bench.choices import nearest_choice
from nemo_rl_moe.bench.flops.models import find_model
from nemo_rl_moe.bench.references.gap import shown, step_seconds, utilisation
from nemo_rl_moe.bench.references.table import Result, SourceOf, published, read_results, systems
from nemo_rl_moe.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--model", metavar="NAME", help="only results of this model")
    parser.add_argument("--system", metavar="NAME", help="only results of this machine")
    parser.add_argument("--precision", metavar="FORMAT", help="only results in bf16, fp8, mxfp8 or nvfp4")
    parser.add_argument("--file", type=Path, metavar="FILE", help="a file of results instead of the published ones")


def run(arguments: argparse.Namespace) -> None:
    """Prints the results.

    Raises:
        UserError: a wrong file, or a filter that nothing is known by.
    """
    if arguments.file is None:
        results, sources = published()
        rows = list(results.values())
    else:
        file = read_results(arguments.file)
        rows, sources = file.results, file.sources
    rows = _filtered(arguments, rows)
    if arguments.json:
        print(json.dumps([_as_dict(row, sources) for row in rows], indent=1))
    else:
        print("\n".join(_lines(rows, sources)))


def _filtered(arguments: argparse.Namespace, rows: list[Result]) -> list[Result]:
    if arguments.system is not None:
        nearest_choice("system", arguments.system, systems())
        rows = [row for row in rows if row.system == arguments.system]
    if arguments.precision is not None:
        nearest_choice("precision", arguments.precision, ("bf16", "fp8", "mxfp8", "nvfp4"))
        rows = [row for row in rows if row.precision == arguments.precision]
    if arguments.model is not None:
        wanted = _short(arguments.model)
        if wanted not in {_short(row.model) for row in rows}:
            find_model(arguments.model)
        rows = [row for row in rows if _short(row.model) == wanted]
    if not rows:
        raise UserError("no result has all that was asked for")
    return rows


def _short(model: str) -> str:
    return model.rpartition("/")[2].lower()


def _as_dict(row: Result, sources: dict[str, SourceOf]) -> dict[str, Any]:
    share = utilisation(row)
    seconds = row.step_seconds or step_seconds(row, row.speed_range[1])
    return row.model_dump() | {
        "mfu": None if share is None else share[1],
        "step_seconds": seconds,
        "source": sources[row.source].model_dump(),
    }


def _lines(rows: list[Result], sources: dict[str, SourceOf]) -> list[str]:
    width = max(len(row.id) for row in rows)
    lines = [f"{'result':{width}s} GPUs  format  batch  tokens  TFLOP/s/GPU   peak  tok/s/GPU   step s  layout"]
    for row in rows:
        low, high = row.speed_range
        share, seconds = utilisation(row), row.step_seconds or step_seconds(row, high)
        speed = f"{high:g}" if low == high else f"{low:g}-{high:g}"
        lines.append(
            f"{row.id:{width}s} {row.gpus or '-':>4}  {row.precision or '-':6s} {row.global_batch or '-':>6}  "
            f"{row.sequence or '-':>6}  {speed:>11s}  {'-' if share is None else format(share[1], '.1%'):>5s}  "
            f"{'-' if row.tokens_per_second is None else format(row.tokens_per_second, ',.0f'):>9s}  "
            f"{'-' if seconds is None else format(seconds, '.1f'):>7s}  {shown(row.layout)}"
        )
    lines += ["", "caveats"]
    lines += [f"  {row.id}: {text}" for row in rows for text in row.caveats]
    used = {row.source: sources[row.source] for row in rows}
    lines += [f"  all of {name}: {text}" for name, source in used.items() for text in source.caveats]
    lines += ["", "sources"]
    lines += [f"  {name}: {source.title}, {source.revision}, {source.url}" for name, source in used.items()]
    return lines
