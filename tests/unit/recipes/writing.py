"""Recipes written for a test, and what their problems say."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from nemo_rl_moe.recipe.load import load_recipe
from nemo_rl_moe.recipe.source import Problem, RecipeError

CONFIGS = Path(__file__).resolve().parents[3] / "examples/configs"
PERFORMANCE = CONFIGS / "recipes/llm/performance"
TINY = Path(__file__).parent / "fixtures/recipes/llm/grpo-tiny-moe-cpu.yaml"


def write(folder: Path, name: str, text: str) -> Path:
    """Writes a dedented YAML file."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text).lstrip("\n"))
    return path


def problems_of(path: Path, *overrides: str) -> list[Problem]:
    """The problems of a recipe that must not load."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return caught.value.problems
