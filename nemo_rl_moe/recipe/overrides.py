"""Overrides of the command line, in Hydra's grammar, laid over a composed recipe.

`a.b=1` sets a key that exists in the recipe or in the schema, `+a.b=1` adds one, `++a.b=1` does either, `~a.b` deletes.
Only Hydra's parser is used, and only when there are overrides: importing it costs more than reading a recipe.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.compose import merge
from nemo_rl_moe.recipe.source import (
    MAX_DEPTH,
    Node,
    Path,
    Problem,
    RecipeError,
    Source,
    dotted,
    find,
    shown,
    split_dotted,
)

KeysAt = Callable[[Path], "Iterable[str] | None"]


def apply_overrides(root: Node, overrides: Sequence[str], keys_at: KeysAt, problems: list[Problem]) -> Node:
    """Applies the overrides from left to right.

    Args:
        root: the composed recipe.
        overrides: arguments such as `grpo.seed=1`.
        keys_at: the keys that the schema allows under a path; None where any key is allowed.
        problems: gets every override that cannot be parsed or applied.
    """
    for text in overrides:
        try:
            root = _apply_one(root, text, keys_at)
        except RecipeError as error:
            problems.extend(error.problems)
    return root


def _apply_one(root: Node, text: str, keys_at: KeysAt) -> Node:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    source = Source(f"command line '{text}'", 0)
    try:
        parsed = OverridesParser.create().parse_override(text)
        value = _plain(parsed.value())
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise _error(
            "override", "", source, text, f"{reason}; expected key=value, +key=value, ++key=value or ~key"
        ) from None
    except RecursionError:
        raise _error("override", "", source, text, "the value is nested too deep") from None
    try:
        path = split_dotted(parsed.key_or_group)
    except UserError as error:
        raise _error("override", "", source, text, str(error)) from None
    if len(path) + _depth(value) > MAX_DEPTH:
        raise _error(
            "override", dotted(path[:3]), source, text, f"maps and lists are nested deeper than {MAX_DEPTH} levels"
        )
    if parsed.package is not None or any(isinstance(key, int) for key in path):
        raise _error("override", text, source, text, "expected a dotted key of maps; lists are replaced as a whole")
    if parsed.is_sweep_override() or isinstance(value, _Unsupported):
        raise _error("override", dotted(path), source, text, "a sweep, but a run takes one value")
    if parsed.is_delete():
        return _delete(root, path, parsed.value_type is not None, value, source)
    existing = find(root, path)
    if parsed.is_add() and existing is not None and existing.value is not None and not isinstance(value, dict):
        message = (
            f"exists already with the value {shown(existing.plain())} ({existing.source}); drop the +, or write ++"
        )
        raise _error("override", dotted(path), source, value, message)
    if not parsed.is_add() and not parsed.is_force_add() and existing is None:
        _refuse_new(root, path, value, source, keys_at)
    return _set(root, path, _node(value, source))


class _Unsupported:
    """A value that Hydra parses and a recipe cannot hold."""


def _plain(value: Any) -> Any:
    """Hydra's parsed value as plain data."""
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "text"):
        return value.text
    return _Unsupported()


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


def _node(value: Any, source: Source) -> Node:
    if isinstance(value, dict):
        return Node({key: _node(item, source) for key, item in value.items()}, source)
    if isinstance(value, list):
        return Node([_node(item, source) for item in value], source)
    return Node(value, source)


def _set(node: Node, path: Path, value: Node) -> Node:
    if not path:
        return merge(node, value)
    key, rest = path[0], path[1:]
    assert isinstance(key, str)
    keys = dict(node.value) if isinstance(node.value, dict) else {}
    keys[key] = _set(keys[key], rest, value) if key in keys else _nested(rest, value)
    return replace(node, value=keys) if isinstance(node.value, dict) else Node(keys, value.source, node)


def _nested(path: Path, value: Node) -> Node:
    for key in reversed(path):
        value = Node({str(key): value}, value.source)
    return value


def _delete(root: Node, path: Path, has_value: bool, value: Any, source: Source) -> Node:
    found = find(root, path)
    if found is None:
        raise _error("override", dotted(path), source, None, "nothing to delete: the recipe has no such key")
    if has_value and found.plain() != value:
        message = f"deletes {shown(value)}, but the value is {shown(found.plain())} ({found.source})"
        raise _error("override", dotted(path), source, value, message)
    return _without(root, path)


def _without(node: Node, path: Path) -> Node:
    assert isinstance(node.value, dict) and isinstance(path[0], str)
    keys = dict(node.value)
    if len(path) == 1:
        del keys[path[0]]
    else:
        keys[path[0]] = _without(keys[path[0]], path[1:])
    return replace(node, value=keys)


def _refuse_new(root: Node, path: Path, value: Any, source: Source, keys_at: KeysAt) -> None:
    """A plain `a.b=1` must name a key of the schema, or one that the recipe has."""
    for depth in range(len(path)):
        parent, key = path[:depth], str(path[depth])
        allowed = keys_at(parent)
        present = find(root, path[: depth + 1]) is not None
        if present or (allowed is not None and key in allowed):
            continue
        name = dotted(path[: depth + 1])
        if allowed is None:
            message = f"no such key in the recipe; +{dotted(path)}=... adds it"
        else:
            near = difflib.get_close_matches(key, list(allowed), 1)
            message = "unknown key" + (f"; did you mean {dotted((*parent, near[0]))}?" if near else "")
        raise _error("unknown key", name, source, value, message)


def _error(rule: str, path: str, source: Source, value: Any, message: str) -> RecipeError:
    return RecipeError([Problem(rule, path, source, value, message)])
