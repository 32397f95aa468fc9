"""Inheritance of recipes: `defaults`, `_override_`, null and `???`.

The rules, in full:
- `defaults:` names the parents: a string or a list, relative to the file that names them. Each parent is composed with
  its own parents first; then the parents are merged from left to right, then the child. The later one wins.
- Maps merge key by key; lists and scalars replace; null replaces whatever was there, a whole map included.
- `_override_: true` in a map drops the map that the file inherits, at any depth, before the file's own keys count.
- `???` is a value that someone must set; it never replaces a value that is there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from nemo_rl_moe.recipe.source import MISSING, Node, Problem, RecipeError, dotted
from nemo_rl_moe.recipe.yaml_file import read_yaml

DEFAULTS, OVERRIDE = "defaults", "_override_"


@dataclass
class Composed:
    """A recipe after inheritance: its tree, the file's own part, and every file that took part, parents first."""

    root: Node
    inherited: Node | None
    own: Node
    files: list[Path]


@dataclass
class FileCache:
    """Files read and composed so far; families of recipes share parents, which are then read once."""

    composed: dict[Path, Composed] = field(default_factory=dict)


def compose(path: str | Path, cache: FileCache | None = None) -> Composed:
    """Composes a recipe file with everything it inherits.

    Raises:
        RecipeError: unreadable or malformed file, missing parent, cycle, `_override_` on nothing.
    """
    return _compose(Path(path).resolve(), (), cache or FileCache())


def shown_path(path: Path) -> str:
    """The path as messages show it: relative to the working directory when it lies under it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def is_file(path: Path) -> bool:
    """Whether there is such a file; a name that no file can have (too long, with a null byte) is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Whether there is such a folder."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _compose(path: Path, open_files: tuple[Path, ...], cache: FileCache) -> Composed:
    if path in cache.composed:
        return cache.composed[path]
    own = read_yaml(path, shown_path(path))
    parents = []
    for parent in _parents(own, path):
        target = path.parent / str(parent.value)
        if not is_file(target):
            where = f"{shown_path(target)} (relative to {shown_path(path.parent)}/)"
            raise _error("parent", parent, f"no such recipe: {where}")
        target = target.resolve()
        if target in (*open_files, path):
            loop = [*(*open_files, path)[(*open_files, path).index(target) :], target]
            raise _error("cycle", parent, "the recipe inherits from itself: " + " -> ".join(map(shown_path, loop)))
        parents.append(_compose(target, (*open_files, path), cache))
    body = replace(own, value={k: v for k, v in own.value.items() if k != DEFAULTS})  # type: ignore[union-attr]
    inherited: Node | None = None
    for parent_recipe in parents:
        inherited = parent_recipe.root if inherited is None else merge(inherited, parent_recipe.root)
    problems: list[Problem] = []
    root = apply(inherited, body, (), problems)
    if problems:
        raise RecipeError(problems)
    files = list(dict.fromkeys([file for p in parents for file in p.files] + [path]))
    cache.composed[path] = Composed(root, inherited, body, files)
    return cache.composed[path]


def _parents(own: Node, path: Path) -> list[Node]:
    """The entries of `defaults`."""
    assert isinstance(own.value, dict)
    node = own.value.get(DEFAULTS)
    if node is None or node.value is None:
        return []
    items = node.value if isinstance(node.value, list) else [node]
    for item in items:
        if not isinstance(item.value, str):
            raise _error("parent", item, f"found {item.plain()!r}, expected a file name or a list of file names")
    return items


def _error(rule: str, node: Node, message: str) -> RecipeError:
    return RecipeError([Problem(rule, DEFAULTS, node.source, node.plain(), message)])


def merge(older: Node, newer: Node) -> Node:
    """Merges two composed nodes; the newer wins, and remembers what it replaced."""
    if newer.value == MISSING:
        return older
    if isinstance(older.value, dict) and isinstance(newer.value, dict):
        keys = dict(older.value)
        for key, item in newer.value.items():
            keys[key] = merge(keys[key], item) if key in keys else item
        return Node(
            keys, newer.source, older.overrode if newer.overrode is None else newer.overrode.under(older.overrode)
        )
    return newer.under(older)


def apply(inherited: Node | None, own: Node, path: tuple[str, ...], problems: list[Problem]) -> Node:
    """Lays a file's own node over what it inherits, taking `_override_` out on the way."""
    if not isinstance(own.value, dict):
        _refuse_markers(own, path, problems)
        return own if inherited is None else merge(inherited, own)
    marker = own.value.get(OVERRIDE)
    body = {key: item for key, item in own.value.items() if key != OVERRIDE}
    dropped = _drops(marker, inherited, path, problems)
    below = inherited.value if inherited is not None and isinstance(inherited.value, dict) and not dropped else {}
    laid = {key: apply(below.get(key), item, (*path, key), problems) for key, item in body.items()}
    if inherited is None or (isinstance(inherited.value, dict) and not dropped):
        return Node({**below, **laid}, own.source, inherited.overrode if inherited else None)
    return Node(laid, own.source, inherited)


def _drops(marker: Node | None, inherited: Node | None, path: tuple[str, ...], problems: list[Problem]) -> bool:
    if marker is None:
        return False
    where = dotted((*path, OVERRIDE))
    if not isinstance(marker.value, bool):
        problems.append(Problem("_override_", where, marker.source, marker.plain(), "expected true or false"))
        return False
    if marker.value and (inherited is None or not isinstance(inherited.value, dict)):
        found = "nothing" if inherited is None else f"{inherited.plain()!r} ({inherited.source})"
        message = f"drops an inherited map, but {dotted(path) or 'the file'} inherits {found}"
        problems.append(Problem("_override_", where, marker.source, True, message))
    return marker.value


def _refuse_markers(node: Node, path: tuple[str | int, ...], problems: list[Problem]) -> None:
    """Lists replace as a whole, so `_override_` inside one would do nothing."""
    if isinstance(node.value, list):
        for index, item in enumerate(node.value):
            _refuse_markers(item, (*path, index), problems)
    elif isinstance(node.value, dict):
        for key, item in node.value.items():
            if key == OVERRIDE:
                message = "has no effect inside a list, which replaces the inherited one as a whole"
                problems.append(Problem("_override_", dotted((*path, key)), item.source, item.plain(), message))
            _refuse_markers(item, (*path, key), problems)
