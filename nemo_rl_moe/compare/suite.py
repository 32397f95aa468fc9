"""A folder of pairs as one summary: workloads by metrics, completed and blocked ones apart."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_moe.compare import as_json, tables
from nemo_rl_moe.compare.comparison import Line, Pair, compare
from nemo_rl_moe.compare.health import check
from nemo_rl_moe.compare.names import ACCURACY
from nemo_rl_moe.compare.read import is_source, read_run, read_runs
from nemo_rl_moe.compare.run_data import as_map
from nemo_rl_moe.compare.window import Window
from nemo_rl_moe.errors import UserError

_BASELINE = "base"
MARK = "°"
MARK_MEANS = f"{MARK} no difference shown: the interval of the change spans zero."
# Title, columns; a column is its head, the row's key, and the kind of its line.
_TABLES = (
    (
        "Step time, seconds",
        (
            ("end to end", "step_time.e2e", "mean"),
            ("policy training", "step_time.policy_training", "mean"),
            ("log-probabilities", "step_time.logprob", "mean"),
            ("exposed generation", "step_time.exposed_generation", "mean"),
            ("refit", "step_time.refit", "mean"),
        ),
    ),
    (
        "Throughput, tokens/s per GPU",
        (
            ("end to end, mean of rates", "throughput.e2e", "mean of rates"),
            ("end to end, whole window", "throughput.e2e", "whole window"),
            ("policy training", "throughput.policy_training", "mean of rates"),
            ("log-probabilities", "throughput.logprob", "mean of rates"),
        ),
    ),
    (
        "Learning and lengths",
        (
            ("mean reward", "reward", "mean"),
            ("gen_kl_error", "gen_kl_error", "mean"),
            ("tokens per sample", "tokens_per_sample", "mean"),
        ),
    ),
)


@dataclass(frozen=True)
class Workload:
    """One run against its baseline in a suite.

    Attributes:
        name: folders below the suite's, and the run's name where a baseline has several.
        pair: the comparison; None when a run could not be read.
        reasons: why it is blocked; empty when it is completed.
    """

    name: str
    pair: Pair | None
    reasons: list[str]


@dataclass(frozen=True)
class Suite:
    """All pairs of a folder."""

    folder: Path
    workloads: list[Workload]

    @property
    def completed(self) -> list[tuple[str, Pair]]:
        """Name and comparison of those that have numbers."""
        return [(each.name, each.pair) for each in self.workloads if each.pair is not None and not each.reasons]

    @property
    def blocked(self) -> list[Workload]:
        """Those that have none."""
        return [each for each in self.workloads if each.reasons]


@dataclass(frozen=True)
class SummaryTable:
    """Workloads by metrics."""

    title: str
    head: list[str]
    rows: list[list[str]]


def read_suite(
    folder: Path, window: Window | None = None, treatment: Sequence[str] = (), validation_samples: int | None = None
) -> Suite:
    """Compares every pair below a folder.

    A folder with an entry whose name begins with `base` is a workload: that entry is its baseline, each other run its
    counterpart. Folders may be nested.

    Raises:
        UserError: there is no such folder, or no run in it.
    """
    if not folder.is_dir():
        raise UserError(f"--suite {folder}: no such folder")
    try:
        found = _workloads(folder, (), window, treatment, validation_samples)
    except OSError as error:
        raise UserError(f"--suite {error.filename or folder}: cannot read ({error.strerror})") from error
    if not found:
        raise UserError(
            f"--suite {folder}: no pair in it, expected folders that hold a run named base… and others beside it"
        )
    return Suite(folder, found)


def _workloads(
    folder: Path, above: tuple[Path, ...], window: Window | None, treatment: Sequence[str], samples: int | None
) -> list[Workload]:
    """Those of a folder and the folders in it.

    Args:
        above: the folders that it was reached through, the suite's first.
    """
    entries = sorted(p for p in folder.iterdir() if not p.name.startswith("."))
    sources = [p for p in entries if is_source(p)]
    bases = [p for p in sources if p.name.startswith(_BASELINE)]
    found = []
    if sources:
        name = " / ".join(each.name for each in (*above, folder)[1:]) or folder.resolve().name
        others = [p for p in sources if p not in bases]
        if len(bases) != 1:
            names = ", ".join(p.name for p in bases or others)
            what = f"{len(bases)} baselines" if bases else "no baseline (a run whose name begins with base)"
            found.append(Workload(name, None, [f"{what} among {names}"]))
        elif not others:
            found.append(Workload(name, None, [f"nothing to compare {bases[0].name} with", *_endings(bases)]))
        else:
            for other in others:
                label = name if len(others) == 1 else f"{name} / {other.stem if other.is_file() else other.name}"
                found.append(_workload(label, bases[0], other, window, treatment, samples))
    for entry in entries:
        # A link to a folder above has no end.
        if entry.is_dir() and entry not in sources and not any(entry.samefile(each) for each in (*above, folder)):
            found += _workloads(entry, (*above, folder), window, treatment, samples)
    return found


def _workload(
    name: str, base: Path, run: Path, window: Window | None, treatment: Sequence[str], samples: int | None
) -> Workload:
    try:
        before, after = read_runs([base, run])
        (pair,) = compare(before, [after], window=window, treatment=treatment, validation_samples=samples)
    except UserError as error:
        return Workload(name, None, [*str(error).splitlines(), *_endings([base, run])])
    return Workload(name, pair, tables.problems(pair) if pair.blocked else [])


def _endings(paths: Sequence[Path]) -> list[str]:
    """How the runs that can be read ended early, for pairs that have no comparison to say so."""
    found = []
    for path in paths:
        with contextlib.suppress(UserError):
            run = read_run(path)
            early = check(run, Window(1, 1)).early_end()
            found += [f"{run.name}: {early}"] if early is not None else []
    return found


def summary(suite: Suite) -> list[SummaryTable]:
    """The tables of the completed workloads; columns that no workload logs are left out."""
    found: list[SummaryTable] = []
    completed = suite.completed
    if not completed:
        return found
    for title, columns in _TABLES:
        cells = {head: [_cell(pair, key, kind) for _, pair in completed] for head, key, kind in columns}
        heads = [head for head, column in cells.items() if any(cell != "-" for cell in column)]
        first = [["GPUs", "matched"]] if title == _TABLES[0][0] else [[]]
        rows = [
            [name, *([_devices(pair), _matched(pair)] if first[0] else []), *(cells[head][i] for head in heads)]
            for i, (name, pair) in enumerate(completed)
        ]
        if heads:
            found.append(SummaryTable(title, ["workload", *first[0], *heads], rows))
    rows = [[name, *_accuracy(pair)] for name, pair in completed if _accuracy(pair)]
    if rows:
        found.append(SummaryTable("Last validation in common", ["workload", "step", "accuracy", "interval", ""], rows))
    return found


def notes(suite: Suite) -> list[str]:
    """What a reader must know of the completed workloads: confounders, notes, early ends."""
    found = []
    for name, pair in suite.completed:
        if pair.differences.verdict != "matched":
            found.append(f"{name}: {pair.differences.verdict}: {pair.differences.why}")
        found += [f"{name}: {each}" for each in [*pair.warnings, *tables.problems(pair)]]
    return found


def heading(suite: Suite) -> str:
    """How many are completed and blocked, and the steps they have in common."""
    windows = {str(pair.window) for _, pair in suite.completed}
    steps = f"; {windows.pop()}, by logged step number" if len(windows) == 1 else ""
    return f"{suite.folder}: {len(suite.completed)} completed, {len(suite.blocked)} blocked{steps}"


def document(suite: Suite) -> dict[str, Any]:
    """The suite as JSON data."""
    return {
        "suite": str(suite.folder),
        "completed": [{"workload": name, **as_json.pair_dict(pair)} for name, pair in suite.completed],
        "blocked": [
            {"workload": each.name, "reasons": each.reasons, "pair": each.pair and as_json.pair_dict(each.pair)}
            for each in suite.blocked
        ],
    }


def _line(pair: Pair, key: str, kind: str) -> Line | None:
    return next((line for line in pair.lines if (line.row.key, line.kind) == (key, kind)), None)


def _cell(pair: Pair, key: str, kind: str) -> str:
    line = _line(pair, key, kind)
    if line is None or (line.base is None and line.run is None):
        return "-"
    both = f"{tables.number(line.base, line.row.unit)} → {tables.number(line.run, line.row.unit)}"
    if line.change is None:
        return both
    mark = f" {MARK}" if line.shown == tables.NO_DIFFERENCE else ""
    return f"{both} ({tables.change_text(line.change, line.row.change == 'percent')}){mark}"


def _accuracy(pair: Pair) -> list[str]:
    overall = [each for each in pair.accuracies if each.metric == ACCURACY]
    if not overall:
        return []
    row = tables.accuracy_row(overall[-1])
    return [str(overall[-1].step), f"{row.base} → {row.run} ({row.change})", row.interval, row.remark]


def _devices(pair: Pair) -> str:
    """Devices of both runs by their configurations."""
    counts = []
    for health in (pair.base, pair.run):
        cluster = as_map(as_map(health.run.config).get("cluster"))
        nodes, each = cluster.get("num_nodes"), cluster.get("gpus_per_node")
        counts.append(str(nodes * each) if isinstance(nodes, int) and isinstance(each, int) else "-")
    return counts[0] if counts[0] == counts[1] else " → ".join(counts)


def _matched(pair: Pair) -> str:
    return {"matched": "yes", "not matched": "no"}.get(pair.differences.verdict, "unknown")
