"""A suite as one page: the summary, what is blocked, and each pair in full below."""

from __future__ import annotations

from nemo_rl_moe.compare import suite, tables
from nemo_rl_moe.compare.page import compare_page, shell
from nemo_rl_moe.compare.page.shell import escape
from nemo_rl_moe.compare.suite import Suite


def document(found: Suite) -> str:
    """The page."""
    counts = [f"{len(found.completed)} completed", f"{len(found.blocked)} blocked"]
    title = found.folder.resolve().name
    body = [f"<h1>{escape(title)}</h1>", f'<p class="soft">{escape(suite.heading(found))}</p>']
    body.append(shell.box("Blocked", [f"{e.name}: {'; '.join(e.reasons)}" for e in found.blocked], "bad"))
    for table in suite.summary(found):
        rows = [[escape(cell) for cell in row] for row in table.rows]
        classes = ["text", *(["num"] * (len(table.head) - 1))]
        body += [f"<h3>{escape(table.title)}</h3>", shell.table([escape(h) for h in table.head], rows, classes)]
    if found.completed:
        body.append(f'<p class="soft small">{escape(suite.MARK_MEANS)}</p>')
    body.append(shell.box("Notes", suite.notes(found)))
    if found.completed:
        body.append("<h2>Each pair</h2>")
    for name, pair in found.completed:
        inner = [f'<p class="soft small">{escape(tables.observations(pair))}</p>', *compare_page.numbers(pair)]
        inner += compare_page.differences("Configuration", pair.differences.config, level=3)
        inner += compare_page.differences("Environment", pair.differences.environment, level=3)
        head = f"{escape(name)}: {escape(pair.differences.verdict)}"
        body.append(f"<details><summary>{head}</summary>{''.join(inner)}</details>")
    return shell.page(f"{title}: {', '.join(counts)}", body)
