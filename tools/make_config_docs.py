"""Writes docs/configuration.md from the schema and the rules: `python tools/make_config_docs.py [--check]`."""

from __future__ import annotations

import argparse
import sys
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from annotated_types import Ge, Gt, Le, Lt  # noqa: E402
from pydantic_core import PydanticUndefined  # noqa: E402

from nemo_rl_moe.recipe.commands import to_yaml  # noqa: E402
from nemo_rl_moe.recipe.rule_names import READING_RULES  # noqa: E402
from nemo_rl_moe.recipe.rules import RULES  # noqa: E402
from nemo_rl_moe.recipe.rules.runtime import (  # noqa: E402
    CPU_ONLY_LIMITS,
    GPU_ONLY_LIMITS,
    RUN_LIMITS,
    RUN_RULE,
)
from nemo_rl_moe.recipe.schema import Section  # noqa: E402
from nemo_rl_moe.recipe.schema_walk import section_of, sections  # noqa: E402

PAGE = REPO / "docs/configuration.md"

HEAD = """# Configuration

<!-- Made by tools/make_config_docs.py from nemo_rl_moe/recipe/schema and nemo_rl_moe/recipe/rules. Do not edit. -->

Every key of a recipe. A key that is not here is an error. How recipes inherit from one another, and how a command line
changes them, is in [recipes.md](recipes.md).

A type in the tables is `int`, `float`, `bool`, `str`, a list or map of those, or one of the words listed. Types are not
bent: `"3"` is no number and `1` is no boolean; an `int` is accepted where a `float` is asked for. `null` in place of a
whole section gives the section's defaults.
"""

RULES_HEAD = """
## Rules between keys

`validate`, `plan` and `run` check these. Every problem is reported at once, with file and line. What a rule finds is an
error, unless the report says warning or note.
"""
READING_HEAD = """
## Rules of files, values and the command line

These come first: where one is broken, keys have no values that could be compared.
"""
LIMITS_HEAD = """
## Limits of a run

What this version does not act on. On a CPU the rule `CPU limits` makes it an error everywhere. On GPUs a recipe may ask
for it, be validated and planned; only `run` refuses it, under the name of the rule below.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD, *(_section(path, section) for path, section in sections() if path)]
    between = _rules((rule.name, rule.reason) for rule in RULES)
    reading, run = _rules(READING_RULES.items()), _rules([(RUN_RULE.name, RUN_RULE.reason)])
    return "\n".join(parts) + RULES_HEAD + between + READING_HEAD + reading + LIMITS_HEAD + run + _limits()


def _rules(rows: Iterable[tuple[str, str]]) -> str:
    return "\n| rule | reason |\n|---|---|\n" + "".join(f"| {name} | {reason} |\n" for name, reason in rows)


def _limits() -> str:
    rows = [
        f"| `{limit.key}` | {' or '.join(f'`{to_yaml(value).split()[0]}`' for value in limit.honoured)} "
        f"| {device} | {_cell(limit.reason)} |\n"
        for device, limits in (("all", RUN_LIMITS), ("CPU", CPU_ONLY_LIMITS), ("GPU", GPU_ONLY_LIMITS))
        for limit in limits
    ]
    return "\n| key | acted on | devices | reason |\n|---|---|---|---|\n" + "".join(rows)


def _section(path: str, section: type[Section]) -> str:
    rows = [
        f"| `{name}` | {_type(field)} | {_default(field)} | {_cell(field.description or '')} |"
        for name, field in section.model_fields.items()
        if section_of(field.annotation) is None or typing.get_origin(field.annotation) is dict
    ]
    title = f"## `{path}`\n\n{' '.join((section.__doc__ or '').split())}\n"
    inner = [name for name, field in section.model_fields.items() if section_of(field.annotation) is not None]
    below = "\nSections below: " + ", ".join(f"`{path}.{name}`" for name in inner) + ".\n" if inner else ""
    table = "\n| key | type | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n" if rows else ""
    return title + below + table


def _type(field: Any) -> str:
    bounds = [_bound(item) for item in field.metadata]
    return _cell(_annotation(field.annotation) + "".join(bound for bound in bounds if bound))


def _annotation(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    simple = {Any: "any", type(None): "null"}
    if annotation in simple:
        return simple[annotation]
    if origin is typing.Annotated:
        return _annotation(args[0]) + "".join(bound for bound in map(_bound, args[1:]) if bound)
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_annotation, args))
    if origin in (list, dict):
        return f"{'list' if origin is list else 'map'} of {_annotation(args[-1])}"
    return "section" if issubclass(annotation, Section) else annotation.__name__


def _bound(item: Any) -> str:
    for kind, sign in ((Gt, ">"), (Ge, "≥"), (Lt, "<"), (Le, "≤")):
        if isinstance(item, kind):
            return f" {sign} {getattr(item, kind.__name__.lower()):g}"
    return ""


def _default(field: Any) -> str:
    if field.is_required():
        return "**required**"
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined or isinstance(default, Section):
        return ""
    return f"`{default if isinstance(default, str | dict | list) else to_yaml(default).split()[0]}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> int:
    """Writes the page, or with --check tells whether it is current."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page is not current")
    text = page()
    if parser.parse_args().check:
        current = PAGE.read_text(encoding="utf-8") == text
        print(f"{PAGE.relative_to(REPO)} is {'current' if current else 'not current: run tools/make_config_docs.py'}")
        return 0 if current else 1
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(REPO)}: {len(text.splitlines())} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
