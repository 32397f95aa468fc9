"""A composed tree against the schema: every unknown key, wrong type and missing value at once, with its line."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import ValidationError

from nemo_rl_moe.recipe.schema import Recipe
from nemo_rl_moe.recipe.schema_walk import annotation_at, keys_at, optional, section_of
from nemo_rl_moe.recipe.source import MISSING, Node, Path, Problem, RecipeError, dotted, find, leaves, nearest, shown

_EXPECTED = {
    "bool_type": "expected true or false",
    "int_type": "expected an integer",
    "float_type": "expected a number",
    "string_type": "expected text (quote it)",
    "list_type": "expected a list",
    "dict_type": "expected a map",
    "model_type": "expected a map",
    "none_required": "expected null",
    "greater_than": "expected more than {gt:g}",
    "greater_than_equal": "expected at least {ge:g}",
    "less_than": "expected less than {lt:g}",
    "less_than_equal": "expected at most {le:g}",
    "literal_error": "expected {expected}",
    "finite_number": "expected a finite number",
}


def typed(root: Node, earlier: list[Problem]) -> Recipe:
    """Checks a composed, resolved tree against the schema.

    Args:
        root: the tree.
        earlier: problems found before; their keys are not reported again.

    Raises:
        RecipeError: the earlier problems and every one found here.
    """
    problems = earlier + [
        Problem("mandatory", dotted(path), node.source, MISSING, f"the value is {MISSING}: it must be set")
        for path, node in leaves(root)
        if node.value == MISSING
    ]
    data = _without_cleared(root.plain(), ())
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        unset = {problem.path for problem in problems}
        found = (_problem(root, item) for item in error.errors(include_url=False))
        raise RecipeError(problems + [problem for problem in found if problem.path not in unset]) from None
    if problems:
        raise RecipeError(problems)
    return recipe


def _without_cleared(data: Any, path: Path) -> Any:
    """Takes out sections that null cleared: nothing is inherited there, so the schema's defaults count."""
    if not isinstance(data, dict):
        return data
    return {
        key: _without_cleared(value, (*path, key))
        for key, value in data.items()
        if value is not None or not _is_plain_section((*path, key))
    }


def _is_plain_section(path: Path) -> bool:
    annotation = annotation_at(path)
    return annotation is not None and section_of(annotation) is not None and not optional(annotation)


def _problem(root: Node, error: Any) -> Problem:
    """One of pydantic's errors as ours."""
    kind, location = error["type"], tuple(error["loc"])
    if kind == "missing":
        near = nearest(root, location)
        return Problem("missing key", dotted(location), near.source, None, "the key is missing and has no default")
    path = _existing(root, location)
    node = nearest(root, path)
    value = node.plain()
    if kind == "extra_forbidden":
        allowed = keys_at(path[:-1]) or []
        match = difflib.get_close_matches(str(path[-1]), allowed, 1)
        hint = f"; did you mean {dotted((*path[:-1], match[0]))}?" if match else f"; {_elsewhere(str(path[-1]))}"
        return Problem("unknown key", dotted(path), node.source, value, ("unknown key" + hint).rstrip("; "))
    template = _EXPECTED.get(kind)
    if template is None:
        expected = str(error["msg"]).removeprefix("Value error, ")
    else:
        expected = template.format(**error.get("ctx", {}))
    allowed_null = annotation_at(path)
    if template and allowed_null is not None and optional(allowed_null) and kind != "none_required":
        expected += ", or null"
    return Problem("type", dotted(path), node.source, value, f"found {shown(value)}, {expected}")


def _existing(root: Node, location: Path) -> Path:
    """Pydantic's location without the union branches that are no keys of the recipe."""
    path: Path = ()
    for key in location:
        if find(root, (*path, key)) is not None:
            path = (*path, key)
    return path


def _elsewhere(key: str) -> str:
    """Where in the schema a key of this name does exist."""
    from nemo_rl_moe.recipe.schema_walk import sections

    places = [f"{path}.{key}".lstrip(".") for path, section in sections() if key in section.model_fields]
    return f"there is {places[0]}" if places else ""
