"""One run as a page: how it went, where its time went, what it learned, and samples to read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nemo_rl_moe.compare import phases, report_text, tables
from nemo_rl_moe.compare.names import ACCURACY, MEMORY_PEAK, ROWS, STEP_TIME, THROUGHPUT, TOKENS_PER_SAMPLE
from nemo_rl_moe.compare.one_run import Report, Summary
from nemo_rl_moe.compare.page import charts, shell
from nemo_rl_moe.compare.page.shell import escape
from nemo_rl_moe.compare.run_data import RunData, leaves
from nemo_rl_moe.compare.samples import Sample, read_samples, sampled_steps
from nemo_rl_moe.tracking import definitions

_BADGES = {"done": "good", "running": "warn", "unknown": "soft"}
# Title, metric, unit. What stands in none of them comes last, folded.
_CHARTS = (
    (
        "Learning",
        (
            ("reward", "train/reward", ""),
            ("validation accuracy", ACCURACY, ""),
            ("KL to the reference", "train/kl_penalty", "nat"),
            ("entropy", "train/approx_entropy", "nat"),
            ("loss", "train/loss", ""),
            ("gradient norm", "train/grad_norm", ""),
        ),
    ),
    (
        "Lengths",
        (
            ("tokens per sample", TOKENS_PER_SAMPLE, "tokens"),
            ("share of truncated responses", "train/truncated_fraction", ""),
            ("share of groups with equal rewards", "train/zero_std_fraction", ""),
        ),
    ),
    (
        "Generator against trainer",
        (
            ("gen_kl_error", "train/gen_kl_error", "nat"),
            ("policy_kl_error", "train/policy_kl_error", "nat"),
            ("token_mult_prob_error", "train/token_mult_prob_error", ""),
            ("importance ratio of samples", "train/sampling_importance_ratio", ""),
            ("age of the oldest sample", "train/trajectory_age_max", "versions"),
            ("router agreement", "train/router_agreement", ""),
        ),
    ),
    (
        "Speed and memory",
        (
            *((f"throughput, {row.label}", row.metric, row.unit) for row in ROWS if row.group == THROUGHPUT),
            ("memory peak", MEMORY_PEAK, "GiB"),
        ),
    ),
)
_MOST_STEPS, _MOST_SAMPLES = 40, 8


def document(found: Report) -> str:
    """The page."""
    run, health = found.run, found.health
    title = run.name
    state = run.ending.cause or run.ending.state
    badge = f'<span class="badge {_BADGES.get(run.ending.state, "bad")}">{escape(state)}</span>'
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{badge} {escape(tables.health_line(health))}</p>",
        f'<p class="soft small">{escape(f"{health.window}, by logged step number")}</p>',
        shell.box("Problems", health.problems, "bad"),
        shell.box("Notes", run.notes),
        _tiles(found),
    ]
    body += _timeline(found)
    window = (health.window.first, health.window.last)
    for heading, wanted in _CHARTS:
        body += _charts(heading, run, wanted, window)
    body += _numbers(found)
    body += _samples(run)
    body += _others(run, window)
    body += _settings(run)
    return shell.page(f"{title}: report", body)


def _tiles(found: Report) -> str:
    rows = {(each.row.key, each.kind): each for each in found.rows}
    tiles = []
    steps, planned = found.run.training_steps, found.run.ending.planned_steps
    if len(steps):
        tiles.append(shell.tile("steps", f"{steps[-1]}{f' of {planned}' if planned else ''}", found.run.ending.state))
    if reward := rows.get(("reward", "mean")):
        tiles.append(_tile(reward, "reward, last steps", reward.last, found.ends))
    if found.validations:
        overall = [v for v in found.validations if v.metric == ACCURACY] or found.validations
        last = overall[-1]
        name, _, detail = report_text.validation_text(last).partition(": ")
        tiles.append(shell.tile(f"accuracy, {name}", f"{100 * last.value:.2f} %", detail.partition(" % ")[2]))
    for key, kind, label in (
        ("step_time.e2e", "mean", "step time"),
        ("throughput.e2e", "whole window", "throughput per GPU, whole window"),
        ("memory_peak", "largest", "memory peak"),
    ):
        if (each := rows.get((key, kind))) is not None and each.value is not None:
            tiles.append(_tile(each, label, each.value, found.ends))
    return f'<div class="tiles">{"".join(tiles)}</div>' if tiles else ""


def _tile(found: Summary, label: str, value: float | None, ends: int) -> str:
    unit = found.row.unit
    detail = found.note or ""
    if found.first is not None and found.last is not None:
        detail = f"{tables.number(found.first, unit)} → {tables.number(found.last, unit)}, first and last {ends} steps"
    return shell.tile(label, f"{tables.number(value, unit)} {unit}".strip(), detail)


def _timeline(found: Report) -> list[str]:
    """Seconds of each step by what they went to."""
    steps, seconds, parts = phases.split(found.run)
    if not parts:
        return []
    colours = {label: (i + 1) % len(phases.LABELS) for i, label in enumerate(phases.LABELS)}
    shown = [(label, colours[label], values) for label, values in parts.items()]
    shares = [f"{label} {100 * found.shares[label]:.0f} %" if label in found.shares else label for label, _, _ in shown]
    return [
        f"<h2>{STEP_TIME}</h2>",
        f'<p class="soft small">Where the seconds of each step went; shares are of {escape(str(found.health.window))}.'
        " Generation is what the step waited for it.</p>",
        shell.legend(shares, [colour for _, colour, _ in shown]),
        charts.stacked("time of each step", "s", steps, shown, seconds),
    ]


def _charts(heading: str, run: RunData, wanted: Sequence[tuple[str, str, str]], window: tuple[int, int]) -> list[str]:
    # The first colour is a baseline's, and here is none.
    drawn = [
        charts.curves(title, unit, [("", None), (title, run.series.get(metric))], window)
        for title, metric, unit in wanted
    ]
    if not any(drawn):
        return []
    return [f"<h2>{escape(heading)}</h2>", f'<div class="charts">{"".join(drawn)}</div>']


def _numbers(found: Report) -> list[str]:
    if not found.rows:
        return []
    rows: list[Sequence[str]] = []
    group = None
    for each in found.rows:
        if each.row.group != group:
            group = each.row.group
            rows.append([escape(group)])
        label, *numbers, note = map(escape, report_text.cells(each))
        rows.append([label + (f' <span class="soft small">{note}</span>' if note else ""), *numbers])
    heads = report_text.heads(found)[:-1]
    classes = ["text", *(["num"] * (len(heads) - 1))]
    table = shell.table([escape(head) for head in heads], rows, classes, "stack five")
    listed = "".join(f"<li>{escape(report_text.validation_text(each))}</li>" for each in found.validations)
    accuracies = ["<h3>Validation accuracy</h3>", f"<ul class=small>{listed}</ul>"] if listed else []
    return ["<h2>Numbers</h2>", table, *accuracies]


def _samples(run: RunData) -> list[str]:
    """Samples of steps spread over the run, the newest open."""
    steps = sampled_steps(run.samples)
    if run.samples is None or not steps:
        return []
    spread = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), _MOST_STEPS)).round().astype(int))
    parts = ["<h2>Samples</h2>"]
    if len(spread) < len(steps):
        parts.append(f'<p class="soft small">{len(spread)} of {len(steps)} steps, evenly spread.</p>')
    for i in reversed(spread):
        found, flaws = read_samples(run.samples, steps[i])
        rewards = ", ".join("-" if s.reward is None else f"{s.reward:g}" for s in found[:_MOST_SAMPLES])
        inner = "".join(map(_sample, found[:_MOST_SAMPLES])) + shell.box("Problems", flaws)
        left = len(found) - _MOST_SAMPLES
        inner += f'<p class="soft small">and {left} more in {escape(run.samples)}</p>' if left > 0 else ""
        mark = " open" if i == spread[-1] else ""
        parts.append(f"<details{mark}><summary>step {steps[i]}: rewards {escape(rewards)}</summary>{inner}</details>")
    return parts


def _sample(sample: Sample) -> str:
    reward = "no reward" if sample.reward is None else f"reward {sample.reward:g}"
    kind = "soft" if sample.reward is None else "good" if sample.reward > 0 else "bad"
    cut = "<span class=warn>truncated</span>" if sample.truncated else ""
    more = f'<span class="soft">{escape(sample.more)}</span>' if sample.more else ""
    response = escape(sample.response) or '<span class="soft">(empty)</span>'
    return (
        f'<div class="sample"><div class="head"><b class="{kind}">{reward}</b>{cut}{more}</div>'
        f'<div><pre class="soft">{escape(sample.problem)}</pre></div><div><pre>{response}</pre></div></div>'
    )


def _others(run: RunData, window: tuple[int, int]) -> list[str]:
    """Whatever else was logged, folded."""
    known = {metric for _, wanted in _CHARTS for _, metric, _ in wanted}
    rest = sorted(name for name in run.series if name not in known)
    wanted = [(name, name, found.unit if (found := definitions.find(name)) else "") for name in rest]
    drawn = _charts("", run, [(t, m, "" if unit == "1" else unit) for t, m, unit in wanted], window)[1:]
    if not drawn:
        return []
    count = f"{len(rest)} other metric{'s'[: len(rest) != 1]}"
    return ["<h2>Everything else</h2>", f"<details><summary>{count}</summary>{''.join(drawn)}</details>"]


def _settings(run: RunData) -> list[str]:
    parts = []
    for title, settings in (("Configuration", run.config), ("Environment", run.environment)):
        if settings is None:
            continue
        cells = [(key, tables.side(value)) for key, value in leaves(settings)]
        rows = [[f"<code>{escape(cell)}</code>" for cell in row] for row in cells]
        table = shell.table(["key", "value"], rows, ["text", "text"])
        parts.append(f"<details><summary>{title}</summary>{table}</details>")
    return parts
