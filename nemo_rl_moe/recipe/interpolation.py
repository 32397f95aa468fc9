"""Interpolations, resolved last: `${a.b}`, relative `${.x}`, and arithmetic resolvers.

Resolvers: `add`, `sub`, `mul`, `max`, `min` of two or more numbers and `div` of two. `div` of integers is exact or an
error, because a batch size of 4.0 or a rounded one is never what a recipe means.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nemo_rl_moe.recipe.source import MISSING, Node, Path, Problem, dotted, leaves

Number = int | float


def resolve(root: Node, problems: list[Problem]) -> Node:
    """Replaces every interpolation by its value; the node keeps the line of the interpolation.

    Those that do not resolve stay as they are, and are added to `problems`.
    """
    waiting = [(path, node) for path, node in leaves(root) if isinstance(node.value, str) and "${" in node.value]
    if not waiting:
        return root
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    _register()
    sound, bare = [], root
    for path, node in waiting:
        if _is_well_formed(path, node, problems):
            sound.append((path, node))
        else:
            bare = _replace(bare, path, replace(node, value=None))
    config = OmegaConf.create(bare.plain())
    for path, node in sound:
        try:
            value = _value_at(config, path)
        except (OmegaConfBaseException, ArithmeticError, TypeError, ValueError, RecursionError) as error:
            problems.append(Problem("interpolation", dotted(path), node.source, node.value, _reason(node, error)))
        else:
            root = _replace(root, path, _resolved(value, node))
    return root


def _is_well_formed(path: Path, node: Node, problems: list[Problem]) -> bool:
    """Whether OmegaConf's grammar accepts the text; one that it does not would refuse the whole recipe."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        OmegaConf.create([node.value])
    except (OmegaConfBaseException, RecursionError) as error:
        problems.append(Problem("interpolation", dotted(path), node.source, node.value, _reason(node, error)))
        return False
    return True


def _value_at(config: Any, path: Path) -> Any:
    from omegaconf import OmegaConf

    for key in path:
        config = config[key]
    return OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config


def _resolved(value: Any, node: Node) -> Node:
    if isinstance(value, dict):
        return Node({str(key): _resolved(item, node) for key, item in value.items()}, node.source, node.overrode)
    if isinstance(value, list):
        return Node([_resolved(item, node) for item in value], node.source, node.overrode)
    return Node(value, node.source, node.overrode)


def _replace(node: Node, path: Path, new: Node) -> Node:
    if not path:
        return new
    key: Any = path[0]
    items: Any = node.value
    copied = dict(items) if isinstance(items, dict) else list(items)
    copied[key] = _replace(copied[key], path[1:], new)
    return replace(node, value=copied)


def _reason(node: Node, error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if text.startswith("InterpolationKeyError while resolving interpolation: "):
        text = text.removeprefix("InterpolationKeyError while resolving interpolation: ")
    if "MissingMandatoryValue" in text or MISSING in text:
        text = f"it refers to a value that is still {MISSING}"
    return f"{node.value} does not resolve: {text}"


def _numbers(name: str, values: tuple[Any, ...]) -> tuple[Number, ...]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name} takes numbers, found {value!r}")
    return values


def _fold(name: str, function: Callable[[Any, Any], Any]) -> Callable[..., Number]:
    def resolver(*values: Any) -> Number:
        if len(values) < 2:
            raise TypeError(f"{name} takes two numbers or more, found {len(values)}")
        return functools.reduce(function, _numbers(name, values))

    return resolver


def _div(*values: Any) -> Number:
    if len(values) != 2:
        raise TypeError(f"div takes two numbers, found {len(values)}")
    a, b = _numbers("div", values)
    if b == 0:
        raise ValueError(f"div({a}, {b}): division by zero")
    if isinstance(a, int) and isinstance(b, int):
        if a % b:
            raise ValueError(f"div({a}, {b}) is not an integer ({a / b:g})")
        return a // b
    return a / b


RESOLVERS: dict[str, Callable[..., Number]] = {
    "add": _fold("add", operator.add),
    "sub": _fold("sub", operator.sub),
    "mul": _fold("mul", operator.mul),
    "max": _fold("max", max),
    "min": _fold("min", min),
    "div": _div,
}


@functools.cache
def _register() -> None:
    """Registers the resolvers with OmegaConf, once for each process; nothing else of its state is touched."""
    from omegaconf import OmegaConf

    for name, resolver in RESOLVERS.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)
