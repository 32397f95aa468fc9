"""Questions about the schema: what stands at a path, which keys a section has."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any

from nemo_rl_moe.recipe.schema import Recipe, Section
from nemo_rl_moe.recipe.source import Path


def section_of(annotation: Any) -> type[Section] | None:
    """The section class in an annotation such as `X`, `X | None`, or None where there is none."""
    for option in _options(annotation):
        if isinstance(option, type) and issubclass(option, Section):
            return option
    return None


def optional(annotation: Any) -> bool:
    """Whether null is allowed."""
    return any(option in (None, type(None), Any) for option in _options(annotation))


def _options(annotation: Any) -> list[Any]:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _options(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [inner for option in typing.get_args(annotation) for inner in _options(option)]
    return [annotation]


def _step(annotation: Any, key: Any) -> Any:
    """The annotation one key further down; Any under open maps and lists, None where nothing can be."""
    section = section_of(annotation)
    if section is not None:
        field = section.model_fields.get(str(key))
        return None if field is None else field.annotation
    for option in _options(annotation):
        origin, args = typing.get_origin(option), typing.get_args(option)
        if origin is dict:
            return args[1]
        if origin is list:
            return args[0]
        if option in (Any, dict, list):
            return Any
    return None


def annotation_at(path: Path) -> Any:
    """The annotation at a path of the recipe, None where the schema has nothing."""
    annotation: Any = Recipe
    for key in path:
        annotation = _step(annotation, key)
        if annotation is None:
            return None
    return annotation


def keys_at(path: Path) -> list[str] | None:
    """Keys allowed under a path; None where any key is, an empty list where the value is not a map."""
    annotation = annotation_at(path)
    if annotation is None:
        return []
    section = section_of(annotation)
    if section is not None:
        return list(section.model_fields)
    is_open = any(typing.get_origin(option) is dict or option in (dict, Any) for option in _options(annotation))
    return None if is_open else []


def sections(section: type[Section] = Recipe, path: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Every section with its dotted path, `env.<name>` for a map of sections; parents first."""
    yield path, section
    for name, field in section.model_fields.items():
        below = f"{path}.{name}" if path else name
        inner = section_of(field.annotation)
        if inner is None:
            for option in _options(field.annotation):
                if typing.get_origin(option) is dict:
                    inner, below = section_of(typing.get_args(option)[1]), f"{below}.<name>"
        if inner is not None:
            yield from sections(inner, below)
