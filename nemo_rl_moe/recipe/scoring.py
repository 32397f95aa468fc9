"""Which environment scores the rows of a dataset: one answer for the rules, the data and the documentation."""

from __future__ import annotations

from nemo_rl_moe.recipe.schema import DatasetConfig, Recipe


def environment_name(recipe: Recipe, dataset: DatasetConfig) -> str | None:
    """The dataset's `env_name`, else that of `data.default`, else the only environment there is; None without one."""
    named = dataset.env_name or recipe.data.default.env_name
    return named or (next(iter(recipe.env)) if len(recipe.env) == 1 else None)
