"""A sweep's points: every combination of its axes as a checked recipe, or the reasons why it is none."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from nemo_rl_moe.bench.sweep.axes import AXES, Axis, BadValue, Impossible, Plain
from nemo_rl_moe.bench.sweep.settle import settle
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.load import LoadedRecipe
from nemo_rl_moe.recipe.memory.stages import virtual_stages
from nemo_rl_moe.recipe.model_shape import ModelShape, model_shape
from nemo_rl_moe.recipe.rules import RULES
from nemo_rl_moe.recipe.rules.registry import Context
from nemo_rl_moe.recipe.schema import Recipe, Section
from nemo_rl_moe.recipe.schema_walk import annotation_at, keys_at
from nemo_rl_moe.recipe.source import Problem, RecipeError, nearest, shown, split_dotted

BASE = "base"
_AXES_KEY = "benchmark.sweep.axes"
_LONGEST_NAME = 100


@dataclass(frozen=True)
class Point:
    """One combination.

    Args:
        name: a folder's name: what differs from the base.
        values: value by axis; without the axes that stay as they are in the base.
        changes: those that are not the base's.
    """

    name: str
    values: dict[str, Any]
    changes: dict[str, Any]


class InvalidPoint(Exception):
    """A point that is no recipe that could run.

    Args:
        reasons: each broken rule and its message.
    """

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


class Sweep:
    """A base recipe and its axes.

    Args:
        loaded: a recipe with `benchmark.sweep`.

    Raises:
        UserError: every wrong axis and value at once, with file and line and what is expected.
    """

    def __init__(self, loaded: LoadedRecipe) -> None:
        sweep = loaded.recipe.benchmark.sweep
        if sweep is None:
            raise UserError(f"{loaded.path}: benchmark.sweep: missing; expected a map with axes")
        self.loaded, self.settings = loaded, sweep
        self._shape: ModelShape | None = model_shape(loaded.recipe.policy)
        self._plain = _opened(loaded.recipe)
        self._axes = _checked_axes(loaded, sweep.axes)
        self._settles = frozenset(name for axis in self._axes.values() for name in axis.settles)
        self.base_values = {name: self._base_value(name, axis) for name, axis in self._axes.items()}
        self._check_types()

    def points(self) -> Iterator[Point]:
        """The base, then every combination that is not the base."""
        yield Point(BASE, {}, {})
        names: dict[str, int] = {}
        for values in self._combinations():
            changes = {name: value for name, value in values.items() if not _same(value, self.base_values[name])}
            if changes:
                yield Point(_name(changes, names), values, changes)

    def memory_key(self, point: Point) -> str:
        """Points with one key need the same memory."""
        return repr([value for axis, value in point.values.items() if self._axes[axis].in_memory])

    def _combinations(self) -> Iterator[dict[str, Any]]:
        axes, base = self.settings.axes, self.base_values
        if self.settings.combine == "product":
            for values in itertools.product(*axes.values()):
                yield dict(zip(axes, values, strict=True))
            return
        for count in (1, 2) if self.settings.combine == "pairs" else (1,):
            for chosen in itertools.combinations(axes, count):
                others = [[v for v in axes[name] if not _same(v, base[name])] for name in chosen]
                for values in itertools.product(*others):
                    yield dict(zip(chosen, values, strict=True))

    def recipe(self, point: Point) -> Recipe:
        """The recipe of a point. Made anew each time: 10,000 of them would fill the memory.

        Raises:
            InvalidPoint: it breaks a rule.
        """
        plain = _copied(self._plain)
        if not point.values:
            return Recipe.model_validate(plain)
        if "vpp" in self._axes:
            # Where VPP is an axis it stays as PP changes; elsewhere the layers of a chunk do.
            plain["vpp"] = self.base_values["vpp"]
        for axis, value in point.values.items():
            # What equals the base is written too: another axis's change may depend on it.
            self._axes[axis].write(plain, value)
        for axis, value in point.values.items():
            idle = self._axes[axis].idle(plain)
            if idle and not _same(value, self.settings.axes[axis][0]):
                raise InvalidPoint([f"{axis}: {shown(value)} {idle}"])
        try:
            settle(plain, self._settles, self._shape.num_layers if self._shape else None)
            recipe = Recipe.model_validate(plain)
        except Impossible as reason:
            raise InvalidPoint([str(reason)]) from None
        except ValidationError as error:
            raise InvalidPoint([str(item["msg"]) for item in error.errors(include_url=False)]) from None
        reasons = self._broken_rules(recipe)
        if reasons:
            raise InvalidPoint(reasons)
        return recipe

    def _broken_rules(self, recipe: Recipe) -> list[str]:
        context = Context(recipe, self.loaded.tree, self.loaded.path, self._shape)
        return [
            f"{rule.name}: {finding.message}"
            for rule in RULES
            for finding in rule.check(context)
            if finding.severity == "error"
        ]

    def _base_value(self, name: str, axis: Axis) -> Any:
        if name == "vpp" and self._shape is not None:
            return virtual_stages(self._shape.num_layers, self.loaded.recipe.policy.megatron_cfg)
        return axis.read(self._plain)

    def _check_types(self) -> None:
        """Each value of a dotted key by itself: a wrong type is the sweep file's mistake, not the point's."""
        problems = []
        for name, values in self.settings.axes.items():
            for value in values if name not in AXES else ():
                plain = _copied(self._plain)
                self._axes[name].write(plain, value)
                try:
                    Recipe.model_validate(plain)
                except ValidationError as error:
                    message = str(error.errors(include_url=False)[0]["msg"])
                    problems.append(_problem(self.loaded, name, value, f"found {shown(value)}: {message}"))
        if problems:
            raise RecipeError(problems)


def _checked_axes(loaded: LoadedRecipe, axes: Mapping[str, list[Any]]) -> dict[str, Axis]:
    problems, found = [], {}
    for name, values in axes.items():
        axis = AXES.get(name) or _dotted_axis(name)
        if axis is None:
            problems.append(_problem(loaded, name, None, f"unknown axis{_near(name)}"))
            continue
        found[name] = axis
        if not values:
            problems.append(_problem(loaded, name, values, "found no value, expected at least one"))
        for index, value in enumerate(values):
            try:
                axis.check(value)
            except BadValue as reason:
                problems.append(_problem(loaded, name, value, f"found {shown(value)}, {reason}"))
            if any(_same(value, other) for other in values[:index]):
                problems.append(_problem(loaded, name, value, f"{shown(value)} is there twice"))
    if problems:
        raise RecipeError(problems)
    return found


def _problem(loaded: LoadedRecipe, axis: str, value: Any, message: str) -> Problem:
    # An axis may be a dotted key itself, so its node is looked up by key and not by path.
    node = nearest(loaded.tree, split_dotted(_AXES_KEY))
    inside = node.value.get(axis, node) if isinstance(node.value, dict) else node
    return Problem("sweep axis", f"{_AXES_KEY}.{axis}", inside.source, value, message)


def _near(name: str) -> str:
    import difflib

    known = [*AXES, *(f"policy.megatron_cfg.{key}" for key in keys_at(("policy", "megatron_cfg")) or ())]
    match = difflib.get_close_matches(name, known, 1, 0.5)
    hint = f"; did you mean {match[0]}?" if match else ""
    return f"{hint or ';'} expected one of {', '.join(AXES)}, or a dotted key of the recipe"


def _dotted_axis(name: str) -> Axis | None:
    """A key of the recipe itself as an axis; None where the schema has no such key."""
    try:
        path = split_dotted(name)
    except UserError:
        return None
    if len(path) < 2 or path[0] == "benchmark" or annotation_at(path) is None:
        return None

    def write(plain: Plain, value: Any) -> None:
        for part in path[:-1]:
            below = plain.get(str(part))
            plain[str(part)] = below.model_dump() if isinstance(below, Section) else dict(below or {})
            plain = plain[str(part)]
        plain[str(path[-1])] = value

    def read(plain: Plain) -> Any:
        value: Any = plain
        for part in path:
            value = value.get(part) if isinstance(value, dict) else getattr(value, str(part), None)
        return value

    return Axis(name, lambda value: None, write, read)


def _opened(recipe: Recipe) -> Plain:
    """The recipe with those sections as maps that axes write to; the others need no second check of their types."""
    benchmark = recipe.benchmark.model_copy(update={"sweep": None})
    policy = dict(recipe.policy) | {"megatron_cfg": recipe.policy.megatron_cfg.model_dump()}
    return dict(recipe) | {"benchmark": benchmark, "policy": policy, "cluster": recipe.cluster.model_dump()}


def _copied(value: Any) -> Any:
    return {key: _copied(item) for key, item in value.items()} if isinstance(value, dict) else value


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b


def _name(changes: Mapping[str, Any], taken: dict[str, int]) -> str:
    parts = []
    for axis, value in changes.items():
        text = {None: "null", True: "on", False: "off"}.get(value) if isinstance(value, bool | None) else str(value)
        key = axis.rpartition(".")[2]
        joined = f"{key}{text}" if isinstance(value, int) and not isinstance(value, bool) else f"{key}-{text}"
        parts.append(re.sub(r"[^A-Za-z0-9_.+-]", "_", joined))
    name = "-".join(parts)
    if len(name) > _LONGEST_NAME:
        name = f"{name[: _LONGEST_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    taken[name] = taken.get(name, 0) + 1
    return name if taken[name] == 1 else f"{name}.{taken[name]}"
