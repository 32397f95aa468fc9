"""The frame of every page, with the style of page.css and the script of page.js, and small helpers for HTML."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from importlib import resources

from nemo_rl_moe.printable import printable

# page.css has so many.
COLOURS = 7


def page(title: str, body: Iterable[str]) -> str:
    """A whole document.

    Args:
        title: plain text.
        body: parts of HTML.
    """
    folder = resources.files(__package__)
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    document = "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            # An icon of nothing: without one browsers ask the server for /favicon.ico.
            '<link rel="icon" href="data:,">',
            f"<style>{style}</style></head><body>",
            *body,
            '<div id="tip" role="status"></div>',
            f"<script>{script}</script></body></html>\n",
        ]
    )
    return printable(document)


def escape(text: object) -> str:
    """Text as HTML, in elements and in quoted attributes."""
    return html.escape(str(text), quote=True)


def box(title: str, lines: Sequence[str], kind: str = "") -> str:
    """A box that stands out; nothing when there are no lines."""
    if not lines:
        return ""
    entries = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<div class="box {kind}"><b>{escape(title)}</b><ul>{entries}</ul></div>'


def tile(label: str, value: str, detail: str, kind: str = "") -> str:
    """A number to see first."""
    return (
        f'<div class="tile"><span class="small soft">{escape(label)}</span><b class="{kind}">{escape(value)}</b>'
        f'<span class="small soft">{escape(detail)}</span></div>'
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], classes: Sequence[str], kind: str = "") -> str:
    """A table that scrolls by itself where it is too wide. Cells are HTML; a row of one cell is a heading.

    Args:
        classes: of each column.
        kind: class of the table; `stack` puts the first cell of a row above the others on a phone.
    """
    top = "".join(f'<th class="{k}">{cell}</th>' for cell, k in zip(head, classes, strict=True))
    body = "".join(
        f'<tr class="group"><th colspan="{len(head)}">{row[0]}</th></tr>'
        if len(row) == 1
        else "<tr>" + "".join(f'<td class="{k}">{cell}</td>' for cell, k in zip(row, classes, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table class="{kind}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def legend(names: Sequence[str], numbers: Sequence[int] | None = None) -> str:
    """Names with the colours of their lines, in order or as numbered."""
    entries = []
    for number, name in zip(numbers or range(len(names)), names, strict=True):
        ink = colour(number)
        fill = ink if number < COLOURS else f"repeating-linear-gradient(90deg, {ink} 0 3px, transparent 3px 5px)"
        entries.append(f'<span><i style="background:{fill}"></i>{escape(name)}</span>')
    return f'<div class="legend">{"".join(entries)}</div>'


def colour(number: int) -> str:
    """Of the run or part of that number."""
    return f"var(--c{number % COLOURS})"


def stroke(number: int) -> str:
    """Style of a line: where colours begin again, dashed."""
    return f"stroke:{colour(number)}" + (";stroke-dasharray:5 3" if number >= COLOURS else "")
