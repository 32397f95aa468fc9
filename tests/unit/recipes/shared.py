"""Shipped recipes, loaded once for all test files."""

from __future__ import annotations

from functools import cache

from nemo_rl_moe.recipe.compose import FileCache
from nemo_rl_moe.recipe.load import LoadedRecipe, load_recipe
from tests.unit.recipes.writing import PERFORMANCE

CACHE = FileCache()


@cache
def loaded(name: str, *overrides: str) -> LoadedRecipe:
    """A cluster recipe by its stem. Recipes are frozen, so tests can share them."""
    return load_recipe(PERFORMANCE / f"{name}.yaml", overrides, cache=CACHE)
