"""A suite as plain text and as Markdown."""

from __future__ import annotations

from nemo_rl_moe.compare import markdown, suite
from nemo_rl_moe.compare.suite import Suite
from nemo_rl_moe.compare.text import aligned, section


def lines(found: Suite) -> list[str]:
    """For a terminal."""
    text = [suite.heading(found)]
    for table in suite.summary(found):
        text += ["", table.title, *aligned([table.head, *table.rows], left=(0,))]
    if found.completed:
        text += ["", f"  {suite.MARK_MEANS}"]
    text += section("Notes", suite.notes(found))
    return text + section("Blocked", [f"{each.name}: {reason}" for each in found.blocked for reason in each.reasons])


def markdown_text(found: Suite) -> str:
    """For a pull request."""
    parts = [f"## {suite.heading(found)}"]
    if found.completed:
        parts.append("Values are baseline → run (change).")
    for table in suite.summary(found):
        align = "l" + "r" * (len(table.head) - 1)
        parts += [f"### {table.title}", markdown.table([table.head, *table.rows], align)]
    if found.completed:
        parts.append(suite.MARK_MEANS)
    for title, entries in (
        ("Notes", suite.notes(found)),
        ("Blocked", [f"**{each.name}**: {'; '.join(each.reasons)}" for each in found.blocked]),
    ):
        if entries:
            parts.append("\n".join([f"### {title}", "", *(f"- {entry}" for entry in entries)]))
    return "\n\n".join(parts) + "\n"
