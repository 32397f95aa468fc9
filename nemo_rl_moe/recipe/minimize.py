"""A recipe without the keys that equal what it inherits, so that a file says only what it changes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.compose import OVERRIDE, Composed, compose, shown_path
from nemo_rl_moe.recipe.source import Node, dotted, equal, shown


@dataclass(frozen=True)
class Redundant:
    """A key that could go: its path and the lines it takes (from 1, both inclusive)."""

    path: tuple[str, ...]
    first_line: int
    last_line: int
    value: Any


def redundant_keys(composed: Composed, path: Path) -> list[Redundant]:
    """Keys of the file whose removal leaves the composed recipe as it is, outermost first.

    Raises:
        UserError: the file uses YAML aliases, merged maps or explicit keys.
    """
    if composed.inherited is None:
        return []
    text = path.read_text(encoding="utf-8")
    _refuse_linked_lines(text, path)
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    found: list[Redundant] = []
    _walk(composed.own, composed.inherited, root, (), found)
    return found


def _refuse_linked_lines(text: str, path: Path) -> None:
    """Refuses YAML whose lines cannot go one by one.

    An alias stands for lines elsewhere, a merged map shows through where a key below `<<` went, and a block may begin
    on the line of an explicit key's colon.
    """
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        start = token.start_mark.index
        linked = {
            "aliases": isinstance(token, yaml.AliasToken),
            "a merged map (<<)": isinstance(token, yaml.ScalarToken) and token.plain and token.value == "<<",
            "an explicit key (?)": isinstance(token, yaml.KeyToken) and text[start : start + 2] in ("? ", "?\n"),
        }
        for name, is_used in linked.items():
            if is_used:
                where = f"{shown_path(path)}:{token.start_mark.line + 1}"
                raise UserError(f"{where}: uses YAML {name}, which cannot be minimized line by line")


def _walk(own: Node, inherited: Node, node: yaml.Node, path: tuple[str, ...], found: list[Redundant]) -> None:
    if not isinstance(own.value, dict) or not isinstance(inherited.value, dict):
        return
    if not isinstance(node, yaml.MappingNode) or node.flow_style:
        # A map in braces shares its line with other keys, so it goes as a whole or stays.
        return
    marker = own.value.get(OVERRIDE)
    if marker is not None and marker.value is True:
        # Everything in a map that drops the inherited one is needed, whatever stood there before.
        return
    for key_node, value_node in node.value:
        key = str(key_node.value)
        item, base = own.value.get(key), inherited.value.get(key)
        if item is None or base is None:
            continue
        if _same(item, base):
            found.append(Redundant((*path, key), key_node.start_mark.line + 1, _last_line(value_node), item.plain()))
        else:
            _walk(item, base, value_node, (*path, key), found)


def _same(own: Node, inherited: Node) -> bool:
    """Whether laying `own` over `inherited` changes nothing."""
    if isinstance(own.value, dict):
        if not isinstance(inherited.value, dict) or OVERRIDE in own.value:
            return False
        return all(k in inherited.value and _same(item, inherited.value[k]) for k, item in own.value.items())
    return equal(own.plain(), inherited.plain())


def _last_line(node: yaml.Node) -> int:
    """Last line of a value; a block's end mark stands at the next token, so its last child tells."""
    if isinstance(node, yaml.CollectionNode) and node.value and not node.flow_style:
        last = node.value[-1]
        return _last_line(last[1] if isinstance(last, tuple) else last)
    return node.end_mark.line + (1 if node.end_mark.column or node.end_mark.line == node.start_mark.line else 0)


def minimized(path: Path) -> tuple[str, list[Redundant]]:
    """The file's text without its redundant keys (comments elsewhere stay), and those keys."""
    redundant = redundant_keys(compose(path), path)
    gone = {line for item in redundant for line in range(item.first_line, item.last_line + 1)}
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    # A map whose keys are all inherited is redundant itself, so no map is left without keys.
    return "".join(line for number, line in enumerate(lines, 1) if number not in gone), redundant


def _brief(value: Any) -> str:
    return f"a map of {len(value)} keys" if isinstance(value, dict) else shown(value)


def minimize_command(path: Path, *, check: bool, as_json: bool) -> bool:
    """Prints the minimized file, or with `check` the keys that could go; returns False when a check finds some."""
    text, redundant = minimized(path)
    if as_json:
        rows = [{"key": dotted(item.path), "line": item.first_line, "value": item.value} for item in redundant]
        print(json.dumps({"recipe": shown_path(path), "redundant": rows, "minimized": text}, indent=1))
    elif check:
        for item in redundant:
            print(
                f"{shown_path(path)}:{item.first_line}: {dotted(item.path)}: {_brief(item.value)} is inherited already"
            )
    else:
        print(text, end="")
    return not (check and redundant)
