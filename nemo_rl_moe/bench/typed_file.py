"""A YAML file against a pydantic model: every problem at once, with its line. Bench inputs are read with it."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError

from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.schema.base import Section
from nemo_rl_moe.recipe.source import Node, Problem, RecipeError, dotted, find, nearest, shown
from nemo_rl_moe.recipe.source import Path as KeyPath
from nemo_rl_moe.recipe.yaml_file import read_yaml

T = TypeVar("T", bound=Section)


def read_typed(path: Path, section: type[T], what: str) -> tuple[T, Node]:
    """Reads a file.

    Args:
        path: the file.
        section: the model of its root.
        what: what the file is, such as `workload`.

    Returns:
        The typed file, and its nodes with their lines.

    Raises:
        UserError: no such file, or every problem in it, with file and line, dotted path, value and expectation.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such {what} file")
    root = read_yaml(path, str(path))
    try:
        return section.model_validate(root.plain()), root
    except ValidationError as error:
        problems = [_problem(root, item, section) for item in error.errors(include_url=False)]
        raise RecipeError(problems) from None


def _problem(root: Node, error: Any, section: type[Section]) -> Problem:
    # Pydantic's location holds the branch of a union too, which is no key of the file.
    path: KeyPath = ()
    for key in error["loc"]:
        if find(root, (*path, key)) is not None:
            path = (*path, key)
    node, last = nearest(root, path), error["loc"][-1] if error["loc"] else ""
    if error["type"] == "missing":
        return Problem("missing key", dotted((*path, last)), node.source, None, "the key is missing and has no default")
    if error["type"] == "extra_forbidden":
        match = difflib.get_close_matches(str(last), sorted(set(_field_names(section))), 1)
        hint = f"; nearest: {match[0]}" if match else ""
        return Problem("unknown key", dotted(path), node.source, None, "unknown key" + hint)
    message = str(error["msg"]).removeprefix("Value error, ")
    found = node.plain()
    shown_value = "" if isinstance(found, dict | list) else f"found {shown(found)}: "
    return Problem("type", dotted(path), node.source, found, f"{shown_value}{message[:1].lower()}{message[1:]}")


def _field_names(section: type[Section]) -> Iterator[str]:
    """Keys of a section and of those below it."""
    for name, field in section.model_fields.items():
        yield name
        for part in _sections(field.annotation):
            yield from _field_names(part)


def _sections(annotation: Any) -> Iterator[type[Section]]:
    if get_origin(annotation) in (list, dict, Annotated, Union, types.UnionType):
        for argument in get_args(annotation):
            yield from _sections(argument)
    elif isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
