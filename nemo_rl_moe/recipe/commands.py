"""The commands about recipes: validate, and config show, why and diff."""

from __future__ import annotations

import difflib
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import yaml

from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.compose import FileCache, is_file, is_folder, shown_path
from nemo_rl_moe.recipe.load import LoadedRecipe, load_recipe
from nemo_rl_moe.recipe.schema_walk import annotation_at, keys_at
from nemo_rl_moe.recipe.source import Path, Problem, RecipeError, Source, dotted, equal, shown, split_dotted

_ABSENT = object()


def validate(paths: Sequence[pathlib.Path], *, as_json: bool) -> bool:
    """Prints every problem of every recipe and a summary line; returns whether there is no error."""
    files = recipe_files(paths)
    cache = FileCache()
    found: dict[pathlib.Path, list[Problem]] = {}
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


def recipe_files(paths: Sequence[pathlib.Path]) -> list[pathlib.Path]:
    """The YAML files named, or in the folders named."""
    files: list[pathlib.Path] = []
    for path in paths:
        if is_file(path):
            files.append(path)
        elif is_folder(path):
            inside = sorted([*path.rglob("*.yaml"), *path.rglob("*.yml")])
            if not inside:
                raise UserError(f"{shown_path(path)}: no YAML file in the folder")
            files += inside
        else:
            raise UserError(f"{path}: no such file or folder")
    return list(dict.fromkeys(files))


def collisions(loaded: Sequence[LoadedRecipe]) -> list[tuple[pathlib.Path, Problem]]:
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


def show(path: pathlib.Path, overrides: Sequence[str], *, as_json: bool) -> None:
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


def why(path: pathlib.Path, overrides: Sequence[str], key: str, *, as_json: bool) -> None:
    """Prints the value of a key and the chain of values that it overrode.

    Raises:
        UserError: the schema or the recipe has no such key.
    """
    keys = split_dotted(key)
    loaded = load_recipe(path, overrides, check=False)
    history = loaded.why(key)
    current = _value_at(loaded.resolved, keys, has_history=bool(history))
    if as_json:
        rows = [{"value": n.plain(), "file": n.source.file, "line": n.source.line or None} for n in history]
        print(json.dumps({"key": key, "value": current, "history": rows}, indent=1))
        return
    print(f"{key} = {_brief(current)}")
    if not history:
        print("  the schema's default")
    for depth, node in enumerate(history):
        print(f"  {'set at' if depth == 0 else 'overrode'} {node.source}: {_brief(node.plain())}")


def _value_at(resolved: Any, path: Path, *, has_history: bool) -> Any:
    """The value at a path of the resolved recipe; None under a null, and where a value was cleared or deleted."""
    if annotation_at(path) is None:
        raise UserError(f"{dotted(path)}: the schema has no such key{_near(path, keys_at(path[:-1]))}")
    current = resolved
    for depth, part in enumerate(path):
        if current is None:
            return None
        inside = part in current if isinstance(current, dict) else isinstance(part, int) and part < len(current)
        if not inside:
            if has_history:
                return None
            known = list(current) if isinstance(current, dict) and depth == len(path) - 1 else None
            raise UserError(f"{dotted(path)}: the recipe has no such key{_near(path, known)}")
        current = current[part]
    return current


def _near(path: Path, known: list[str] | None) -> str:
    match = difflib.get_close_matches(str(path[-1]), known or [], 1)
    return f"; did you mean {dotted((*path[:-1], match[0]))}?" if match else ""


def _brief(value: Any) -> str:
    return f"a map of {len(value)} keys" if isinstance(value, dict) else shown(value)


def diff(a: pathlib.Path, b: pathlib.Path, *, as_json: bool) -> None:
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


def flatten(data: Any, path: Path = ()) -> dict[str, Any]:
    """Dotted keys to scalars and lists; an empty map has none."""
    if isinstance(data, dict):
        return {key: value for name, item in data.items() for key, value in flatten(item, (*path, name)).items()}
    return {dotted(path): data}
