"""Comparisons as one page: numbers, curves, distributions, and what differs besides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nemo_rl_moe.compare import tables
from nemo_rl_moe.compare.comparison import Line, Pair
from nemo_rl_moe.compare.matching import Difference
from nemo_rl_moe.compare.names import ACCURACY, ROWS, STEP_TIME, THROUGHPUT, Row
from nemo_rl_moe.compare.page import charts, shell
from nemo_rl_moe.compare.page.shell import escape
from nemo_rl_moe.compare.run_data import RunData

_BADGES = {"matched": "good", "not matched": "bad", "not known to be matched": "warn"}
_KINDS = {"better": "good", "worse": "bad"}
_TILES = (("step_time.e2e", "mean"), ("throughput.e2e", "whole window"), ("reward", "mean"))
_MORE_CURVES = (
    ("loss", "train/loss", ""),
    ("gradient norm", "train/grad_norm", ""),
    ("entropy", "train/approx_entropy", "nat"),
    ("truncated responses", "train/truncated_fraction", ""),
)


def document(pairs: Sequence[Pair]) -> str:
    """One page for all pairs; they have the baseline and the window in common."""
    title = f"{pairs[0].base.run.name} → {', '.join(pair.run.run.name for pair in pairs)}"
    runs = [pairs[0].base.run, *(pair.run.run for pair in pairs)]
    body = [f"<h1>{escape(title)}</h1>"]
    for pair in pairs:
        body += _pair(pair, alone=len(pairs) == 1)
    body += _curves(runs, pairs[0])
    for pair in pairs:
        label = "" if len(pairs) == 1 else f": {pair.name}"
        body += differences(f"Configuration{label}", pair.differences.config)
        body += differences(f"Environment{label}", pair.differences.environment)
    notes = [note for pair in pairs[:1] for note in tables.footnotes(pair)]
    body += ["<h2>How to read this</h2>", *(f"<p>{escape(note)}</p>" for note in notes), _runs(pairs)]
    return shell.page(title, body)


def _pair(pair: Pair, *, alone: bool) -> list[str]:
    found = pair.differences
    badge = f'<span class="badge {_BADGES[found.verdict]}">{escape(found.verdict)}</span>'
    parts = [] if alone else [f"<h2>{escape(pair.name)}</h2>"]
    parts.append(f"<p>{badge} {escape(found.why)}</p>")
    parts.append(f'<p class="soft small">{escape(tables.observations(pair))}</p>')
    hint = tables.hint(pair)
    parts.append(shell.box("Problems", [*tables.problems(pair), *([hint] if hint else [])], "bad"))
    parts.append(shell.box("Notes", pair.warnings))
    parts += [_tiles(pair), *numbers(pair)]
    return parts


def _tiles(pair: Pair) -> str:
    found = []
    for key in _TILES:
        line = next((line for line in pair.lines if (line.row.key, line.kind) == key), None)
        if line is None or line.change is None:
            continue
        percent = line.row.change == "percent"
        names = {"step_time.e2e": "step time", "throughput.e2e": "throughput, whole window"}
        span = f"{tables.interval_text(line.interval, percent)}" if line.interval else "no interval"
        detail = f"{tables.number(line.base, line.row.unit)} → {tables.number(line.run, line.row.unit)}; {span}"
        value = tables.change_text(line.change, percent)
        found.append(shell.tile(names.get(line.row.key, line.row.label), value, detail, _KINDS.get(line.shown, "")))
    overall = [each for each in pair.accuracies if each.metric == ACCURACY]
    if overall:
        last = overall[-1]
        detail = f"{100 * last.base:.2f} → {100 * last.run:.2f} %; {last.note or ''}"
        found.append(shell.tile(f"accuracy, step {last.step}", f"{100 * last.change:+.2f} points", detail))
    return f'<div class="tiles">{"".join(found)}</div>' if found else ""


def numbers(pair: Pair) -> list[str]:
    """The table of a pair, with each change drawn on a line through zero."""
    limit = max((_reach(line) for line in pair.lines), default=0.0)
    bars = iter([_bar(line, limit) for line in pair.lines])
    rows: list[Sequence[str]] = []
    for section in tables.sections(pair):
        rows.append([escape(section.title)])
        for row in section.rows:
            interval = escape(row.interval) if row.interval != "-" else ""
            change = f'<span class="{_KINDS.get(row.shown, "")}">{escape(row.change)}</span>{_below(interval)}'
            label = escape(row.label) + _below(escape(row.remark))
            bar = "" if section.title == tables.ACCURACY_TITLE else next(bars)
            both = [escape(n) + _below(r) for n, r in zip((row.base, row.run), row.ranges, strict=True)]
            rows.append([label, *both, change, bar])
    head = ["", "baseline", "run", f"change, {escape(tables.HEADS[4])}", ""]
    return [shell.table(head, rows, ["text", "num", "num", "num", "bar"], "stack")] if rows else []


def _below(text: str) -> str:
    return f'<br><span class="soft small">{text}</span>' if text else ""


def _reach(line: Line) -> float:
    """How far the line of changes must reach; wide intervals are cut at three times the change, all at a doubling."""
    if line.row.change != "percent" or line.change is None:
        return 0.0
    ends = line.interval or (line.change, line.change)
    return min(max(map(abs, ends)), 3 * max(abs(line.change), 5.0), 100.0)


def _bar(line: Line, limit: float) -> str:
    if line.row.change != "percent":
        return ""
    low, high = line.interval or (None, None)
    return charts.forest(line.change, low, high, limit, _KINDS.get(line.shown, "soft"))


def _curves(runs: Sequence[RunData], pair: Pair) -> list[str]:
    """Curves and distributions of all runs, blocked ones too: they show where one stops."""
    window = (pair.window.first, pair.window.last)
    names = [run.name for run in runs]
    wanted = [(_title(row), row.metric, row.unit) for row in ROWS] + list(_MORE_CURVES)
    wanted.append(("validation accuracy", ACCURACY, ""))
    drawn = [
        charts.curves(title, unit, [(run.name, run.series.get(metric)) for run in runs], window)
        for title, metric, unit in wanted
    ]
    spread = [
        charts.histogram(_title(row), row.unit, [(run.name, _values(run, row.metric, pair)) for run in runs])
        for row in ROWS
        if row.reduce == "mean"
    ]
    return [
        "<h2>Curves</h2>",
        '<p class="soft small">The shaded steps are compared, and set each range. Point at a curve to read it.</p>',
        shell.legend(names),
        f'<div class="charts">{"".join(drawn)}</div>',
        "<h2>Distributions</h2>",
        '<p class="soft small">Share of the compared steps by value; dashed lines are means.</p>',
        shell.legend(names),
        f'<div class="charts">{"".join(spread)}</div>',
    ]


def _title(row: Row) -> str:
    group = {STEP_TIME: "step time", THROUGHPUT: "throughput"}.get(row.group)
    return f"{row.label}, {group}" if group else row.label


def _values(run: RunData, metric: str, pair: Pair) -> NDArray[np.float64] | None:
    series = run.series.get(metric)
    return None if series is None else pair.window.cut(series).values


def differences(title: str, found: Sequence[Difference] | None, level: int = 2) -> list[str]:
    """What differs, under a heading of some level."""
    head = f"<h{level}>{escape(title)}</h{level}>"
    if found is None:
        return [head, "<p>Not known for both runs.</p>"]
    if not found:
        return [head, "<p>No difference.</p>"]
    kinds = {"confounder": "bad", "treatment": "good", "logging": "soft"}
    rows = [
        [f'<span class="{kinds[kind]}">{kind}</span>', *(f"<code>{escape(cell)}</code>" for cell in rest)]
        for kind, *rest in tables.difference_rows(found)
    ]
    return [
        head,
        shell.table(["kind", "key", "baseline", "run"], rows, ["text", "text", "text", "text"]),
    ]


def _runs(pairs: Sequence[Pair]) -> str:
    healths = [pairs[0].base, *(pair.run for pair in pairs)]
    return "<ul class=small>" + "".join(f"<li>{escape(tables.health_line(each))}</li>" for each in healths) + "</ul>"
