"""A small recipe of its own, so that these tests need no model and no shipped recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_moe.recipe.load import LoadedRecipe, load_recipe

RECIPE = """\
policy:
  model_name: some/model
  train_global_batch_size: 8
  train_micro_batch_size: 1
  precision: float32
  megatron_cfg: {env_vars: {HF_TOKEN: hf_secretvalue, OMP_NUM_THREADS: "1"}}
  generation: {max_new_tokens: 16, vllm_cfg: {precision: float32}}
grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 2, max_num_steps: 10}
data:
  train: {dataset_name: reasoning_gym, task: chain_sum, env_name: sums}
env:
  sums: {verifier: reasoning_gym}
cluster: {device: cpu, gpus_per_node: 1}
"""


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., LoadedRecipe]:
    """load(*overrides, name="small") -> the recipe above; its run directory is <tmp_path>/run unless overridden."""

    def load(*overrides: str, name: str = "small", text: str = RECIPE) -> LoadedRecipe:
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        return load_recipe(path, [f"logger.log_dir={tmp_path / 'run'}", *overrides], check=False)

    return load
