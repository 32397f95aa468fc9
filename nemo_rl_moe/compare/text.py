"""Comparisons as plain aligned text, for a terminal and for whatever reads one."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from nemo_rl_moe.compare import tables
from nemo_rl_moe.compare.comparison import Pair

_WIDTH = 120
_SHOWN_DIFFERENCES = 40


def lines(pairs: Sequence[Pair]) -> list[str]:
    """All pairs; the baseline is the same in all of them."""
    found: list[str] = []
    for number, pair in enumerate(pairs):
        found += [""] * bool(number) + pair_lines(pair)
    return found


def pair_lines(pair: Pair) -> list[str]:
    """One pair."""
    found = [tables.heading(pair), f"  {tables.observations(pair)}"]
    found += [f"  baseline: {tables.health_line(pair.base)}", f"  run:      {tables.health_line(pair.run)}"]
    found += section("Problems", tables.problems(pair))
    if (hint := tables.hint(pair)) is not None:
        found += ["", hint]
    found += _numbers(pair)
    found += section("Notes", pair.warnings)
    found += _differences("Configuration", pair.differences.config)
    found += _differences("Environment", pair.differences.environment)
    missing = tables.not_logged(pair)
    notes = [*([f"Not logged by either run: {', '.join(missing)}."] if missing else []), *tables.footnotes(pair)]
    return found + [line for note in notes for line in ("", *textwrap.wrap(note, _WIDTH))]


def aligned(rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,), indent: str = "  ") -> list[str]:
    """Columns of text; those named in `left` are flush left, all others flush right. The last is never padded."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    found = []
    for row in rows:
        cells = [
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        found.append((indent + "  ".join(cells)).rstrip())
    return found


def section(title: str, entries: Sequence[str]) -> list[str]:
    """Wrapped lines under a title; nothing when there are none."""
    if not entries:
        return []
    wrapped = [textwrap.wrap(entry, _WIDTH, initial_indent="  ", subsequent_indent="    ") for entry in entries]
    return ["", title, *(line for entry in wrapped for line in entry)]


def _numbers(pair: Pair) -> list[str]:
    parts = tables.sections(pair)
    if not parts:
        return []
    rows = [tables.HEADS, *(row.cells for part in parts for row in part.rows)]
    table = iter(aligned(rows, left=(0, 5), indent="  "))
    found = ["", next(table)]
    for part in parts:
        found.append(part.title)
        found += [next(table) for _ in part.rows]
    return found


def _differences(title: str, found: Sequence[tables.Difference] | None) -> list[str]:
    if found is None:
        return ["", f"{title}: not known for both runs"]
    if not found:
        return ["", f"{title}: no difference"]
    rows = [
        (kind, key, f"{textwrap.shorten(before, 60)} → {textwrap.shorten(after, 60)}")
        for kind, key, before, after in tables.difference_rows(found)
    ]
    more = len(rows) - _SHOWN_DIFFERENCES
    table = aligned(rows[:_SHOWN_DIFFERENCES], left=(0, 1, 2))
    return ["", title, *table, *([f"  and {more} more (--json has all)"] if more > 0 else [])]
