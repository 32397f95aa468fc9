"""One YAML file as nodes that know their line.

PyYAML reads YAML 1.1. Two of its readings surprise people and are changed here: `3e-7` is a number (1.1 asks for
`3.0e-7`), and `1:30` and dates stay text (1.1 makes 90 and a date of them).
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from nemo_rl_moe.recipe.source import MAX_DEPTH, MAX_NODES, Node, Path, Problem, RecipeError, Source, dotted

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0o?[0-7_]+|0|[1-9][0-9_]*)$")
_FLOAT = re.compile(
    r"[-+]?(?:(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|[0-9][0-9_]*[eE][-+]?[0-9]+)$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)
_CHANGED_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp", "value")}


class _Loader(_Base):
    """SafeLoader with the number formats above."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _CHANGED_TAGS]
    for first, resolvers in _Base.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))


def read_yaml(path: pathlib.Path, shown_as: str) -> Node:
    """Reads a file whose root is a map.

    Args:
        path: the file.
        shown_as: its name in messages.

    Raises:
        RecipeError: unreadable file, YAML error, tab, duplicate key, root that is not a map; with its line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RecipeError(
            [Problem("file", "", Source(shown_as, 0), None, f"cannot read the recipe: {reason}")]
        ) from error
    tabs = [number for number, line in enumerate(text.splitlines(), 1) if re.match(r" *\t", line)]
    if tabs:
        raise RecipeError(
            [Problem("tab", "", Source(shown_as, n), None, "tab in the indentation, expected spaces") for n in tabs]
        )
    try:
        root = _compose(text)
    except yaml.YAMLError as error:
        raise RecipeError([_syntax_problem(error, shown_as)]) from error
    if root is None:
        return Node({}, Source(shown_as, 1))
    if not isinstance(root, yaml.MappingNode):
        found = "a list" if isinstance(root, yaml.SequenceNode) else repr(root.value)
        raise RecipeError([Problem("root", "", _at(root, shown_as), None, f"the root is {found}, expected a map")])
    problems: list[Problem] = []
    node = _Builder(shown_as, problems).build(root, ())
    if problems:
        raise RecipeError(problems)
    return node


def _compose(text: str) -> yaml.Node | None:
    loader = _Loader(text)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


def _at(node: yaml.Node, file: str) -> Source:
    return Source(file, node.start_mark.line + 1)


def _syntax_problem(error: yaml.YAMLError, file: str) -> Problem:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    parts = [getattr(error, "context", None), getattr(error, "problem", None)]
    text = ", ".join(part for part in parts if part) or str(error)
    return Problem("yaml", "", Source(file, mark.line + 1 if mark else 0), None, f"not valid YAML: {text}")


class _Builder:
    """YAML nodes to ours; problems are collected, not raised one by one."""

    def __init__(self, file: str, problems: list[Problem]) -> None:
        self.file = file
        self.problems = problems
        self._constructor = yaml.constructor.SafeConstructor()
        self._open: list[yaml.Node] = []
        self._built = 0

    def build(self, node: yaml.Node, path: Path) -> Node:
        source = _at(node, self.file)
        self._built += 1
        if self._built > MAX_NODES:
            if self._built == MAX_NODES + 1:
                self._problem("yaml", node, path[:3], f"more than {MAX_NODES} values, aliases written out")
            return Node(None, source)
        if isinstance(node, yaml.ScalarNode):
            return Node(self._scalar(node, path), source)
        with self._inside(node, path) as is_sound:
            if not is_sound:
                return Node(None, source)
            if isinstance(node, yaml.SequenceNode):
                return Node([self.build(item, (*path, i)) for i, item in enumerate(node.value)], source)
            return Node(self._map(node, path), source)

    @contextmanager
    def _inside(self, node: yaml.Node, path: Path) -> Iterator[bool]:
        """Goes into a map or list; False where there is no end of it."""
        endless = any(node is outer for outer in self._open)
        deep = len(self._open) >= MAX_DEPTH
        if endless:
            self._problem("yaml", node, path, "an alias inside its own anchor has no end")
        elif deep:
            self._problem("yaml", node, path[:3], f"maps and lists are nested deeper than {MAX_DEPTH} levels")
        self._open.append(node)
        try:
            yield not endless and not deep
        finally:
            self._open.pop()

    def _map(self, node: yaml.Node, path: Path) -> dict[str, Node]:
        own: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                for parent in self._merge_sources(value_node, path):
                    # Of several merged maps the earlier wins, and the map's own keys win over all of them.
                    with self._inside(parent, path) as is_sound:
                        merged = {**(self._map(parent, path) if is_sound else {}), **merged}
                continue
            key = self._key(key_node, path)
            if key in own:
                first = own[key].source.line
                self._problem("duplicate key", key_node, (*path, key), f"the key stands twice, first in line {first}")
                continue
            built = self.build(value_node, (*path, key))
            # The key's line is where a reader looks, also for a map that starts in the next one.
            own[key] = Node(built.value, _at(key_node, self.file))
        return {**{key: item for key, item in merged.items() if key not in own}, **own}

    def _merge_sources(self, node: yaml.Node, path: Path) -> Iterator[yaml.MappingNode]:
        for item in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if isinstance(item, yaml.MappingNode):
                yield item
            else:
                self._problem("yaml", item, path, "'<<' expects a map or a list of maps")

    def _key(self, node: yaml.Node, path: Path) -> str:
        if not isinstance(node, yaml.ScalarNode):
            self._problem("yaml", node, path, "a key must be text, found a map or a list")
            return ""
        # `on: 1` is the key "on" to everyone but YAML 1.1, which reads true; keys are always taken as they are written.
        return str(node.value)

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> str | int | float | bool | None:
        if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.rsplit(":", 1)[1] not in _SCALARS:
            self._problem("yaml", node, path, f"the tag {node.tag!r} is not allowed in a recipe")
            return None
        try:
            return self._constructor.construct_object(node)
        except (ValueError, yaml.YAMLError):
            self._problem("yaml", node, path, f"{node.value!r} is not a value of the type {node.tag.rsplit(':', 1)[1]}")
            return None

    def _problem(self, rule: str, node: yaml.Node, path: Path, message: str) -> None:
        self.problems.append(Problem(rule, dotted(path), _at(node, self.file), None, message))


_SCALARS = {"str", "int", "float", "bool", "null"}
