"""What the live view shows, as rich texts and tables made from a run. Text of others never counts as markup."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nemo_rl_moe.compare.health import check
from nemo_rl_moe.compare.names import ACCURACY, LEARNING, MEMORY_PEAK, RESOURCES, STEP_TIME, THROUGHPUT
from nemo_rl_moe.compare.phases import LABELS, split
from nemo_rl_moe.compare.run_data import RunData, Series
from nemo_rl_moe.compare.samples import Sample
from nemo_rl_moe.compare.tables import number
from nemo_rl_moe.compare.window import Window
from nemo_rl_moe.printable import printable
from nemo_rl_moe.tracking import definitions
from nemo_rl_moe.tracking.console import clock

# Steps that "now" is the mean of.
RECENT = 10
# Grey that can be read on the dark ground that textual draws.
SOFT = "grey66"
_STATES = {"done": "green", "running": "cyan", "unknown": SOFT}
_COLOURS = dict(zip(LABELS, ("cyan", "yellow", "magenta", "green", "blue", "white", SOFT), strict=True))
_BLOCKS = "▁▂▃▄▅▆▇█"
# Cells that label and numbers take, and the width below which there is room for less.
_TABLE_CELLS, _NARROW = 54, 78
# Enough of a metric's name to know it by.
_NAME_CELLS = 44
_ROWS = (
    (LEARNING, "reward", "train/reward", ""),
    (LEARNING, "validation accuracy", ACCURACY, ""),
    (LEARNING, "loss", "train/loss", ""),
    (LEARNING, "KL to the reference", "train/kl_penalty", "nat"),
    (LEARNING, "gradient norm", "train/grad_norm", ""),
    (LEARNING, "entropy", "train/approx_entropy", "nat"),
    (LEARNING, "gen_kl_error", "train/gen_kl_error", "nat"),
    (LEARNING, "token_mult_prob_error", "train/token_mult_prob_error", ""),
    (RESOURCES, "tokens per sample", "train/mean_tokens_per_sample", "tokens"),
    (RESOURCES, "truncated responses", "train/truncated_fraction", ""),
    (RESOURCES, "memory peak", MEMORY_PEAK, "GiB"),
    (THROUGHPUT, "end to end", "performance/tokens_per_sec_per_gpu", "tokens/s"),
    (THROUGHPUT, "policy training", "performance/policy_training_tokens_per_sec_per_gpu", "tokens/s"),
    (STEP_TIME, "end to end", "timing/train/total_step_time", "s"),
)


def plain(text: object) -> str:
    """Text of a file that others wrote, safe for a terminal."""
    return printable(str(text))


def head(run: RunData, error: str | None = None, width: int = 80) -> Text:
    """Name, state, progress, time left; below, what is wrong."""
    ending, steps = run.ending, run.training_steps
    last = int(steps[-1]) if len(steps) else 0
    text = Text(plain(run.name), style="bold")
    text.append(f"  {plain(ending.cause or ending.state)}", style=_STATES.get(ending.state, "bold red"))
    text.append(f"  step {last}{f' of {ending.planned_steps}' if ending.planned_steps else ''}")
    total = run.series.get("timing/train/total_step_time")
    if total is not None and np.isfinite(total.values).any():
        text.append(f"  {clock(float(np.nansum(total.values)))} in steps", style=SOFT)
        if ending.state == "running" and ending.planned_steps:
            left = float(np.nanmean(total.values[-2 * RECENT :])) * (ending.planned_steps - last)
            text.append(f", about {clock(left)} left", style=SOFT)
    if ending.planned_steps:
        done = round(width * min(1.0, last / ending.planned_steps))
        text.append("\n" + "━" * done, style="cyan").append("━" * (width - done), style=SOFT)
    window = Window(int(steps[0]), last) if len(steps) else Window(1, 1)
    problems = check(run, window).problems if len(steps) or ending.state != "running" else ["no step logged yet"]
    for problem in [*([error] if error else []), *problems, *run.notes]:
        if not problem.startswith("still running"):
            text.append(f"\n{plain(problem)}", style="red" if problem not in run.notes else "yellow")
    return text


def overview(run: RunData, width: int) -> RenderableType:
    """The numbers that matter with their course, and the last steps' time."""
    narrow = width < _NARROW
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for _ in range(1 if narrow else 2):
        table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    heads = ["last"] if narrow else ["last", f"last {min(RECENT, len(run.training_steps))}"]
    table.add_row("", *(Text(title, style="bold") for title in heads))
    group = None
    for title, label, metric, unit in _ROWS:
        series = run.series.get(metric)
        if series is None:
            continue
        if title != group:
            table.add_row(Text(title, style=f"bold {SOFT}"))
            group = title
        recent = series.values[-RECENT:]
        mean = float(recent.mean()) if np.isfinite(recent).all() else math.nan
        name = f"  {label}" + (f" ({unit})" if unit and not narrow else "")
        numbers = [value(float(series.values[-1]), unit), value(mean, unit)][: len(heads)]
        room = width - (_TABLE_CELLS if not narrow else _TABLE_CELLS - 18)
        table.add_row(name, *numbers, sparkline(series, max(8, room)))
    return Group(table, Text(), timeline(run, width))


def value(found: float, unit: str = "") -> Text:
    """A number; one that is not finite stands out."""
    return Text(number(found, unit)) if math.isfinite(found) else Text("not finite", style="bold red")


def sparkline(series: Series, width: int) -> Text:
    """The course of a series in one line of blocks from its lowest to its highest; `!` where it was not finite."""
    parts = np.array_split(series.values, min(width, len(series.values)))
    means = [float(part.mean()) for part in parts]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    text = Text()
    for mean in means:
        if not math.isfinite(mean):
            text.append("!", style="bold red")
        else:
            level = (mean - low) / (high - low) if high > low else 0.0
            text.append(_BLOCKS[min(len(_BLOCKS) - 1, int(level * len(_BLOCKS)))], style="cyan")
    return text


def timeline(run: RunData, width: int, count: int = 8) -> RenderableType:
    """Where the seconds of the last steps went, a bar a step; all bars have one scale."""
    steps, seconds, parts = split(run)
    if not parts:
        return Text()
    seconds, steps = seconds[-count:], steps[-count:]
    heights = {label: values[-count:] for label, values in parts.items()}
    total = sum(float(v.sum()) for v in heights.values())
    legend = Text()
    for label, values in heights.items():
        share = 100 * float(values.sum()) / total if total else 0
        legend.append("█ ", style=_COLOURS[label]).append(f"{label} {share:.0f} %   ")
    longest = max(float(np.sum(list(heights.values()), axis=0).max()), 1e-9)
    rows = []
    for i, step in enumerate(steps):
        line = Text(f"  step {step:>{len(str(steps[-1]))}} {number(float(seconds[i]), 's'):>8} s ")
        cells = max(8, width - line.cell_len)
        ends = np.cumsum([v[i] for v in heights.values()]) / longest * cells
        for label, begin, end in zip(heights, [0, *ends[:-1]], ends, strict=True):
            line.append("█" * (round(end) - round(begin)), style=_COLOURS[label])
        rows.append(line)
    return Group(Text(f"Step time, last {len(rows)}", style=f"bold {SOFT}"), *rows, legend)


def all_metrics(run: RunData, width: int) -> Table:
    """Every metric with its last value and, as far as there is room, its unit, its range and where it stands."""
    rows = [[Text(title, style="bold") for title in ("", "last", "unit", "lowest", "highest", "at step")]]
    for name in sorted(run.series):
        steps, values = run.series[name]
        known = definitions.find(name)
        unit = known.unit if known is not None and known.unit != "1" else ""
        finite = values[np.isfinite(values)]
        ends = [number(float(f(finite))) if len(finite) else "-" for f in (np.min, np.max)]
        rows.append([Text(plain(name)), value(float(values[-1])), *map(Text, (unit, *ends, str(steps[-1])))])
    # A name that is cut can be guessed, a number cannot: numbers keep their width, and there are as many as fit.
    widths = [max(cell.cell_len for cell in column) for column in zip(*rows, strict=True)]
    count = len(widths)
    while count > 2 and sum(widths[1:count]) + 2 * (count - 1) > width - min(widths[0], _NAME_CELLS):
        count -= 1
    table = Table.grid(padding=(0, 2))
    room = max(1, width - sum(widths[1:count]) - 2 * (count - 1))
    table.add_column(no_wrap=True, width=min(widths[0], room))
    for i in range(1, count):
        table.add_column(justify="left" if i == 2 else "right", no_wrap=True, width=widths[i])
    for row in rows:
        table.add_row(*row[:count])
    return table


def samples(step: int, of: Sequence[int], found: Sequence[Sample], flaws: Sequence[str]) -> Text:
    """A step's samples."""
    text = Text(f"step {step} ({list(of).index(step) + 1} of {len(of)} steps with samples)\n", style="bold")
    for sample in found:
        style = SOFT if sample.reward is None else "bold green" if sample.reward > 0 else "bold red"
        text.append("\n" + ("no reward" if sample.reward is None else f"reward {sample.reward:g}"), style=style)
        text.append("  truncated" if sample.truncated else "", style="yellow")
        text.append(f"  {plain(sample.more)}\n", style=SOFT)
        text.append(plain(sample.problem) + "\n", style=SOFT)
        text.append(plain(sample.response or "(empty)") + "\n")
    for flaw in flaws:
        text.append(f"\n{plain(flaw)}", style="red")
    return text
