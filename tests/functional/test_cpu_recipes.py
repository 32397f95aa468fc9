"""Risk: a shipped CPU recipe that validates and does not run. Each trains for real, in few and small steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.functional.cli import MODEL, RECIPES, metrics, run_recipe
from tools.make_tiny_moe import DENSE, MODELS, make

# Starting the workers is most of the time, so the batches are as small as the recipe's layout allows.
SMALL = (
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "grpo.max_num_steps=2",
    # Padded rows come in whole micro-batches: the 16 samples of a step in one of them.
    "policy.train_micro_batch_size=16",
    "policy.logprob_batch_size=16",
    "grpo.val_period=0",
)


def train(name: str, model: Path, folder: Path) -> list[dict]:
    """Runs a recipe for two steps; returns its rows."""
    run_dir = folder / "run"
    done = run_recipe(RECIPES / f"{name}.yaml", run_dir, *SMALL, f"policy.model_name={model}", cwd=folder)
    assert done.code == 0, done.text[-4000:]
    rows = metrics(run_dir)
    assert [row["step"] for row in rows] == [1, 2]
    # Trainer and engine hold the same weights in float32, in every layout: what they disagree by is rounding.
    assert all(row["train/gen_kl_error"] < 1e-9 for row in rows)
    assert [row["train/weight_version"] for row in rows] == [1, 2]
    return rows


@pytest.mark.parametrize("layout", ["padded", "ep2", "pp2"])
def test_recipe_trains_two_steps(layout: str, tmp_path: Path) -> None:
    rows = train(f"grpo-tiny-moe-cpu-{layout}", MODEL, tmp_path)
    assert all(row["performance/total_num_tokens"] > 16 * 24 for row in rows)


def test_a_dense_model_of_random_weights_trains_two_steps(tmp_path: Path) -> None:
    make(tmp_path / "dense", replace(MODELS[DENSE], warmup_steps=0))
    rows = train("grpo-tiny-dense-cpu", tmp_path / "dense", tmp_path)
    assert all(row["performance/total_num_tokens"] > 16 * 24 for row in rows)


def test_dynamic_sampling_fills_the_step_with_groups_that_differ(tmp_path: Path) -> None:
    rows = train("grpo-tiny-moe-cpu-dynamic-sampling", MODEL, tmp_path)
    assert all(row["train/grad_norm"] > 0 for row in rows)
