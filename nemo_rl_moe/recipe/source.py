"""Where values come from: nodes that know their file, line and predecessor, and problems that point at them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from nemo_rl_moe.errors import UserError

Scalar: TypeAlias = "str | int | float | bool | None"
MISSING = "???"
# Levels of maps and lists at most: our walks and OmegaConf's recurse, and a recipe has about ten.
MAX_DEPTH = 50
# A few lines of aliases to aliases can stand for billions of values.
MAX_NODES = 100_000


@dataclass(frozen=True, slots=True)
class Source:
    """A line of a file (counted from 1), or one override of the command line (line 0)."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True, slots=True)
class Node:
    """A value of a recipe: a map of nodes, a list of nodes, or a scalar, with its origin.

    `overrode` is the node that this one replaced as a whole; a map that was merged key by key has none of its own,
    its keys have.
    """

    value: dict[str, Node] | list[Node] | Scalar
    source: Source
    overrode: Node | None = None

    def under(self, older: Node | None) -> Node:
        """This node with `older` at the far end of its chain."""
        if older is None:
            return self
        return replace(self, overrode=older if self.overrode is None else self.overrode.under(older))

    def plain(self) -> Any:
        """The value as plain Python objects."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value


Key: TypeAlias = "str | int"
_PART = re.compile(r"([^.\[\]]+)((?:\[[0-9]{1,9}\])*)")
Path: TypeAlias = "tuple[Key, ...]"


def dotted(path: Path) -> str:
    """`("a", "b", 0)` as `a.b[0]`."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


def split_dotted(text: str) -> Path:
    """`a.b[0]` as `("a", "b", 0)`; the inverse of `dotted`.

    Raises:
        UserError: the text is no dotted path.
    """
    keys: list[Key] = []
    for part in text.split("."):
        match = _PART.fullmatch(part)
        if match is None:
            raise UserError(
                f"{text!r} is no dotted path; expected keys joined by dots, such as a.b, or a.b[0] in a list"
            )
        keys.append(match[1])
        keys.extend(int(index) for index in re.findall(r"[0-9]+", match[2]))
    return tuple(keys)


def child(node: Node, key: Key) -> Node | None:
    """The node under a key or index, or None."""
    if isinstance(node.value, dict):
        return node.value.get(key) if isinstance(key, str) else None
    if isinstance(node.value, list) and isinstance(key, int) and 0 <= key < len(node.value):
        return node.value[key]
    return None


def find(node: Node, path: Path) -> Node | None:
    """The node at the path, or None."""
    current: Node | None = node
    for key in path:
        current = child(current, key) if current is not None else None
    return current


def nearest(node: Node, path: Path) -> Node:
    """The node at the path, or its nearest ancestor that exists."""
    for key in path:
        found = child(node, key)
        if found is None:
            break
        node = found
    return node


def leaves(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Every scalar with its path, empty maps and lists included."""
    if isinstance(node.value, dict) and node.value:
        for key, item in node.value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(node.value, list) and node.value:
        for index, item in enumerate(node.value):
            yield from leaves(item, (*path, index))
    else:
        yield path, node


def chain(root: Node, path: Path) -> list[Node]:
    """Every node that has ever stood at the path, newest first: the value, what it overrode, and so on.

    A null or another value that replaced a whole map above the path is part of the chain of each key in it. A base that
    two parents share stands once for each of them, unless the two would follow one another.
    """
    entries = _chain(root, path)
    return [
        e
        for i, e in enumerate(entries)
        if i == 0 or (e.source, e.value) != (entries[i - 1].source, entries[i - 1].value)
    ]


def _chain(root: Node, path: Path) -> list[Node]:
    if not path:
        return [root, *(_chain(root.overrode, ()) if root.overrode else [])]
    found = child(root, path[0])
    entries = _chain(found, path[1:]) if found is not None else []
    if not isinstance(root.value, dict | list):
        entries = [root]
    if root.overrode is not None:
        entries += _chain(root.overrode, path)
    return entries


Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong (or odd) in a recipe.

    Args:
        rule: short name of the rule, stable; docs/configuration.md lists them.
        path: dotted path of the key.
        source: where the key was written; None when it is a default.
        value: the value found, as plain data.
        message: what was expected, and a near match where there is one.
        severity: errors stop a run; warnings and notes are shown, notes where nothing has to change.
    """

    rule: str
    path: str
    source: Source | None
    value: Any
    message: str
    severity: Severity = "error"

    def __str__(self) -> str:
        where = f"{self.source}: " if self.source else ""
        mark = "" if self.severity == "error" else f"{self.severity}: "
        return f"{where}{mark}{self.path + ': ' if self.path else ''}{self.message}"

    def as_dict(self) -> dict[str, Any]:
        """The problem as JSON data."""
        return {
            "rule": self.rule,
            "severity": self.severity,
            "file": self.source.file if self.source else None,
            "line": self.source.line or None if self.source else None,
            "path": self.path,
            "value": self.value,
            "message": self.message,
        }


class RecipeError(UserError):
    """Everything that is wrong with a recipe, one problem a line."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


def equal(a: Any, b: Any) -> bool:
    """Whether two plain values are one value in YAML: to Python 1, 1.0 and true are equal, to a recipe they are not."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return bool(a == b)


def shown(value: Any, limit: int = 60) -> str:
    """A value as it would stand in YAML, cut to a readable length."""
    text = (
        {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else repr(value)
    )
    return text if len(text) <= limit else text[: limit - 3] + "..."
