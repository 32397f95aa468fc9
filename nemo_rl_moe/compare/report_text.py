"""The report of one run as plain text and as JSON data."""

from __future__ import annotations

from typing import Any

from nemo_rl_moe.compare import tables
from nemo_rl_moe.compare.as_json import run_dict
from nemo_rl_moe.compare.names import ACCURACY
from nemo_rl_moe.compare.one_run import Report, Summary, Validation
from nemo_rl_moe.compare.statistics import LEVEL
from nemo_rl_moe.compare.text import aligned, section


def heads(found: Report) -> tuple[str, ...]:
    """Titles of the columns."""
    ends = f" {found.ends}" if found.ends else ""
    return "", "mean", f"first{ends}", f"last{ends}", "lowest", "highest", ""


def cells(found: Summary) -> tuple[str, ...]:
    """A row as text, in the columns of `heads`."""
    row = found.row
    label = row.label + (f" ({row.unit})" if row.unit else "")
    label += f", {found.kind}" if found.kind in ("mean of rates", "whole window") else ""
    return label, *(tables.number(value, row.unit) for value in found.numbers), found.note or ""


def validation_text(found: Validation) -> str:
    """`step 20: 60.00 % of 15 (36-80)`."""
    name = found.metric.removeprefix(ACCURACY).strip("/")
    of = "" if found.samples is None else f" of {found.samples} samples"
    interval = "" if found.interval is None else f" ({100 * found.interval.low:.0f}-{100 * found.interval.high:.0f})"
    return f"{name + ', ' if name else ''}step {found.step}: {100 * found.value:.2f} %{of}{interval}"


def document(found: Report) -> dict[str, Any]:
    """The report as JSON data."""
    return {
        "confidence": LEVEL,
        "steps": [found.health.window.first, found.health.window.last],
        "run": run_dict(found.health),
        "metrics": [
            {"key": each.row.key, "metric": each.row.metric, "unit": each.row.unit, "kind": each.kind}
            | dict(zip(("value", "first", "last", "lowest", "highest"), each.numbers, strict=True))
            | {"note": each.note}
            for each in found.rows
        ],
        "validations": [
            {"metric": v.metric, "step": v.step, "value": v.value, "samples": v.samples, "interval": v.interval}
            for v in found.validations
        ],
        "time_shares": found.shares,
    }


def lines(found: Report) -> list[str]:
    """The report as text for a terminal."""
    health = found.health
    count = len(health.window) - len(health.missing)
    text = [
        f"{found.run.name}: {tables.health_line(health)}",
        f"  {health.window}, by logged step number: {count} observation{'s'[: count != 1]}",
        *section("Problems", health.problems),
    ]
    table = iter(aligned([heads(found), *(cells(each) for each in found.rows)], left=(0, 6)))
    if found.rows:
        text += ["", next(table)]
    group = None
    for each in found.rows:
        text += [each.row.group] * (each.row.group != group) + [next(table)]
        group = each.row.group
    shares = [f"{label} {100 * share:.1f} %" for label, share in found.shares.items()]
    text += section("Step time", [", ".join(shares)] if shares else [])
    text += section("Validation accuracy", [validation_text(each) for each in found.validations])
    return text + section("Notes", found.run.notes)
