"""The table of rules, and where a finding is pointed at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_moe.recipe.compose import shown_path
from nemo_rl_moe.recipe.model_shape import ModelShape
from nemo_rl_moe.recipe.schema import Recipe
from nemo_rl_moe.recipe.source import Node, Problem, Severity, find, nearest, split_dotted


@dataclass(frozen=True)
class Context:
    """What a rule may look at. `model` is None when the model's shape is not known on this machine."""

    recipe: Recipe
    tree: Node
    path: Path
    model: ModelShape | None


@dataclass(frozen=True)
class Finding:
    """What a rule found: the keys that disagree, the most telling first, and what was expected."""

    keys: tuple[str, ...]
    message: str
    severity: Severity = "error"


@dataclass(frozen=True)
class Rule:
    """A rule with the name that reports use and the reason that the documentation gives."""

    name: str
    reason: str
    check: Callable[[Context], Iterator[Finding]]


RULES: list[Rule] = []


def rule(name: str, reason: str) -> Callable[[Callable[[Context], Iterator[Finding]]], Callable]:
    """Puts a generator of findings into the table."""

    def register(check: Callable[[Context], Iterator[Finding]]) -> Callable[[Context], Iterator[Finding]]:
        RULES.append(Rule(name, reason, check))
        return check

    return register


def value_of(recipe: Recipe, key: str) -> Any:
    """The value at a dotted key, defaults included."""
    value: Any = recipe
    for part in split_dotted(key):
        value = value.get(part) if isinstance(value, dict) else getattr(value, str(part), None)
    return value


def blame(rule: Rule, finding: Finding, context: Context) -> Problem:
    """Points a finding at one key: one of the command line, else of the recipe's own file, else the first."""
    own = shown_path(context.path.resolve())

    def rank(key: str) -> int:
        node = find(context.tree, split_dotted(key))
        if node is None:
            return 3
        return 0 if node.source.line == 0 else 1 if node.source.file == own else 2

    key = min(finding.keys, key=rank)
    source = nearest(context.tree, split_dotted(key)).source
    value = value_of(context.recipe, key)
    plain = value.model_dump(mode="json") if hasattr(value, "model_dump") else value
    return Problem(rule.name, key, source, plain, finding.message, finding.severity)
