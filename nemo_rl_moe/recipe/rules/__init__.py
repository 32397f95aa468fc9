"""Rules between the keys of a recipe. Every rule is checked, so that all problems come at once.

A rule whose premise is broken by another rule's problem says nothing: one mistake gives one problem.
"""

from __future__ import annotations

from pathlib import Path

from nemo_rl_moe.recipe.model_shape import model_shape
from nemo_rl_moe.recipe.rules import (
    batches,
    checkpoints,
    expert_dispatch,
    layout,
    naming,
    objective,
    overlap,
    placement,
    precision,
    replay,
    runtime,
    trainer,
)
from nemo_rl_moe.recipe.rules.registry import RULES, Context, Rule, blame
from nemo_rl_moe.recipe.schema import Recipe
from nemo_rl_moe.recipe.source import Node, Problem


def check_rules(recipe: Recipe, tree: Node, path: Path) -> list[Problem]:
    """Every rule's findings, each at the line of the key that the recipe itself wrote last.

    Args:
        recipe: the typed recipe.
        tree: its nodes with their origins.
        path: the recipe's file.
    """
    context = Context(recipe, tree, path, model_shape(recipe.policy))
    return [blame(rule, finding, context) for rule in RULES for finding in rule.check(context)]


__all__ = [
    "RULES",
    "Rule",
    "batches",
    "check_rules",
    "checkpoints",
    "expert_dispatch",
    "layout",
    "naming",
    "objective",
    "overlap",
    "placement",
    "precision",
    "replay",
    "runtime",
    "trainer",
]
