"""Comparisons as Markdown for a pull request."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_rl_moe.compare import tables
from nemo_rl_moe.compare.comparison import Pair
from nemo_rl_moe.compare.matching import Difference


def text(pairs: Sequence[Pair]) -> str:
    """All pairs, one heading each."""
    return "\n\n".join("\n\n".join(_pair(pair)) for pair in pairs) + "\n"


def table(rows: Sequence[Sequence[str]], align: str) -> str:
    """A table whose first row is its head; `align` has `l` or `r` for each column."""
    rule = ["---:" if side == "r" else "---" for side in align]
    return "\n".join("| " + " | ".join(map(cell, row)) + " |" for row in [rows[0], rule, *rows[1:]])


def cell(text: str) -> str:
    """Text that cannot end its cell."""
    return text.replace("|", "\\|").replace("\n", " ")


def _pair(pair: Pair) -> list[str]:
    found = [f"## {tables.heading(pair)}", f"{tables.observations(pair)}. Values are baseline → run (change)."]
    runs = [f"- {label}: `{health.run.path}` ({health.run.source})" for label, health in _labelled(pair)]
    found.append("\n".join(runs))
    if lines := tables.problems(pair):
        found.append("\n".join(["**Problems**", "", *(f"- {line}" for line in lines)]))
    if (hint := tables.hint(pair)) is not None:
        found.append(f"`{hint.split(' compares')[0]}` compares what both have.")
    for part in tables.sections(pair):
        rows = [(row.label, " → ".join(row.numbers), row.change, row.interval, row.remark) for row in part.rows]
        found += [f"### {part.title}", table([("", "baseline → run", *tables.HEADS[3:]), *rows], "lrrrl")]
    if pair.warnings:
        found.append("\n".join(["### Notes", "", *(f"- {line}" for line in pair.warnings)]))
    found += _differences("Configuration", pair.differences.config)
    found += _differences("Environment", pair.differences.environment)
    return found + tables.footnotes(pair)


def _labelled(pair: Pair) -> list[tuple[str, tables.Health]]:
    return [("baseline", pair.base), ("run", pair.run)]


def _differences(title: str, found: Sequence[Difference] | None) -> list[str]:
    if found is None:
        return [f"{title}: not known for both runs."]
    if not found:
        return [f"{title}: no difference."]
    rows = [(kind, f"`{key}`", f"`{a}`", f"`{b}`") for kind, key, a, b in tables.difference_rows(found)]
    head = f"<details><summary>{title}: {len(rows)} difference{'s'[: len(rows) > 1]}</summary>"
    return [head, table([("kind", "key", "baseline", "run"), *rows], "llll"), "</details>"]
