"""A tokenizer folder and small recipes for the data tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.data.tokenizer import load_tokenizer
from nemo_rl_moe.recipe.schema import PolicyConfig, Recipe
from tools.make_tiny_moe import Settings, make_tokenizer

CHAIN_SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(Settings()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Any:
    return load_tokenizer(PolicyConfig(model_name=str(tokenizer_dir), generation={}))


def make_recipe(
    train: dict[str, Any],
    *,
    prompts_per_step: int = 2,
    policy: dict[str, Any] | None = None,
    env: dict[str, Any] | None = None,
    **data: Any,
) -> Recipe:
    """A recipe with the given data section and defaults everywhere else."""
    return Recipe(
        policy={"model_name": "unused", "generation": {}, **(policy or {})},
        grpo={"num_prompts_per_step": prompts_per_step},
        data={"train": train, **data},
        env=env or {"math": {"verifier": "math_verify"}},
    )
