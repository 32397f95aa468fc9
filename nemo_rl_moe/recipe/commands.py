"""The commands about recipes: validate, and config show, why and diff."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.compose import FileCache, shown_path
from nemo_rl_moe.recipe.load import LoadedRecipe, load_recipe
from nemo_rl_moe.recipe.schema_walk import annotation_at, keys_at
from nemo_rl_moe.recipe.source import Problem, RecipeError, Source, dotted, equal, shown, split_dotted

_ABSENT = object()


def validate(paths: Sequence[Path], *, as_json: bool) -> bool:
    """Prints every problem of every recipe and a summary line; returns whether there is no error."""
    files = recipe_files(paths)
    cache = FileCache()
    found: dict[Path, list[Problem]] = {}
    loaded: list[LoadedRecipe] = []
    for file in files:
        try:
            recipe = load_recipe(file, cache=cache)
        except RecipeError as error:
            found[file] = error.problems
        else:
            found[file] = [p for p in recipe.warnings if as_json or p.severity == "warning"]
            loaded.append(recipe)
    for file, problem in collisions(loaded):
        found[file].append(problem)
    errors = sum(problem.severity == "error" for problems in found.values() for problem in problems)
    if as_json:
        rows = [{"recipe": shown_path(f), "problems": [p.as_dict() for p in ps]} for f, ps in found.items()]
        print(json.dumps({"recipes": rows, "errors": errors}, indent=1))
        return errors == 0
    # Recipes of one family show the same problem of their parent; one line for each place is enough.
    for line in dict.fromkeys(str(problem) for problems in found.values() for problem in problems):
        print(line)
    bad = sum(any(p.severity == "error" for p in problems) for problems in found.values())
    print(f"{len(files)} recipe(s), {bad} with errors, {errors} error(s)")
    return errors == 0


def recipe_files(paths: Sequence[Path]) -> list[Path]:
    """The YAML files named, or in the folders named."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted([*path.rglob("*.yaml"), *path.rglob("*.yml")])
            if not inside:
                raise UserError(f"{shown_path(path)}: no YAML file in the folder")
            files += inside
        elif path.exists():
            files.append(path)
        else:
            raise UserError(f"{path}: no such file or folder")
    return list(dict.fromkeys(files))


def collisions(loaded: Sequence[LoadedRecipe]) -> list[tuple[Path, Problem]]:
    """Recipes that would write to the same place: a finished run must not be overwritten by another recipe's."""
    problems = []
    for key in ("logger.log_dir", "checkpointing.checkpoint_dir"):
        section, name = key.split(".")
        seen: dict[str, LoadedRecipe] = {}
        for recipe in loaded:
            value = getattr(getattr(recipe.recipe, section), name)
            if key == "logger.log_dir" and value is None:
                value = f"runs/{recipe.name}"
            if value is None:
                continue
            place = os.path.normpath(value)
            if place in seen:
                node = recipe.why(key)
                message = f"{value} is also the directory of {shown_path(seen[place].path)}"
                source = node[0].source if node else Source(shown_path(recipe.path), 1)
                problems.append((recipe.path, Problem("directory collision", key, source, value, message)))
            seen.setdefault(place, recipe)
    return problems


def show(path: Path, overrides: Sequence[str], *, as_json: bool) -> None:
    """Prints the resolved recipe. A recipe that breaks a rule is shown too, so that one can look into it."""
    resolved = load_recipe(path, overrides, check=False).resolved
    sys.stdout.write(json.dumps(resolved, indent=1) + "\n" if as_json else to_yaml(resolved))


class _Dumper(yaml.SafeDumper):
    """Lists of scalars in one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_list(dumper: yaml.SafeDumper, items: list) -> yaml.Node:
    return dumper.represent_sequence(
        "tag:yaml.org,2002:seq", items, flow_style=not any(isinstance(i, dict | list) for i in items)
    )


_Dumper.add_representer(list, _represent_list)


def to_yaml(data: Any) -> str:
    """Plain data as YAML in the given key order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=120)


def why(path: Path, overrides: Sequence[str], key: str, *, as_json: bool) -> None:
    """Prints the value of a key and the chain of values that it overrode.

    Raises:
        UserError: the schema has no such key.
    """
    loaded = load_recipe(path, overrides, check=False)
    keys = split_dotted(key)
    current: Any = loaded.resolved
    for part in keys:
        try:
            current = current[part]
        except (KeyError, IndexError, TypeError):
            if annotation_at(keys) is None:
                raise UserError(f"{key}: the schema has no such key{_near(keys)}") from None
            current = None
            break
    history = loaded.why(key)
    if as_json:
        rows = [{"value": n.plain(), "file": n.source.file, "line": n.source.line or None} for n in history]
        print(json.dumps({"key": key, "value": current, "history": rows}, indent=1))
        return
    print(f"{key} = {_brief(current)}")
    if not history:
        print("  the schema's default")
    for depth, node in enumerate(history):
        print(f"  {'set at' if depth == 0 else 'overrode'} {node.source}: {_brief(node.plain())}")


def _near(path: tuple[str | int, ...]) -> str:
    match = difflib.get_close_matches(str(path[-1]), keys_at(path[:-1]) or [], 1)
    return f"; did you mean {dotted((*path[:-1], match[0]))}?" if match else ""


def _brief(value: Any) -> str:
    return f"a map of {len(value)} keys" if isinstance(value, dict) else shown(value)


def diff(a: Path, b: Path, *, as_json: bool) -> None:
    """Prints the keys whose resolved values differ."""
    left, right = (flatten(load_recipe(path, check=False).resolved) for path in (a, b))
    rows = [
        (key, left.get(key, _ABSENT), right.get(key, _ABSENT))
        for key in dict.fromkeys([*left, *right])
        if not equal(left.get(key, _ABSENT), right.get(key, _ABSENT))
    ]
    if as_json:
        named = [
            {"key": key} | {side: value for side, value in (("a", x), ("b", y)) if value is not _ABSENT}
            for key, x, y in rows
        ]
        print(json.dumps({"a": shown_path(a), "b": shown_path(b), "differences": named}, indent=1))
        return
    for key, x, y in rows:
        print(f"{key}: {_side(x)} -> {_side(y)}")
    print(f"{len(rows)} key(s) differ" if rows else "no difference")


def _side(value: Any) -> str:
    return "(absent)" if value is _ABSENT else shown(value)


def flatten(data: Any, path: tuple[str | int, ...] = ()) -> dict[str, Any]:
    """Dotted keys to scalars and lists; an empty map has none."""
    if isinstance(data, dict):
        return {key: value for name, item in data.items() for key, value in flatten(item, (*path, name)).items()}
    return {dotted(path): data}
