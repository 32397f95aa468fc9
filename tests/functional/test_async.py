"""Risks of generation ahead: it is not the algorithm it says it is, or a resumed run repeats or skips prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.functional.cli import RECIPES, TINY, metrics, run_recipe

ASYNC = RECIPES / "grpo-tiny-moe-cpu-async-1off.yaml"
SHORT = ("grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=4", "grpo.val_period=0")


def prompt_ids(run_dir: Path, step: int) -> list[int]:
    """Dataset rows of all prompts of a step."""
    lines = (run_dir / f"rollouts/step_{step}.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt_id"] for line in lines]


@pytest.fixture(scope="module")
def sync_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of the recipe that the async one inherits from, on the same devices, with the same correction."""
    folder = tmp_path_factory.mktemp("sync")
    devices = ("cluster.gpus_per_node=2", "cluster.cpus_per_device=1", "policy.generation.colocated.enabled=false")
    split = ("policy.generation.colocated.resources.gpus_per_node=1", "loss_fn.use_importance_sampling_correction=true")
    done = run_recipe(TINY, folder / "run", *SHORT, *devices, *split, "grpo.max_num_steps=4", cwd=folder)
    assert done.code == 0, done.text
    return folder / "run"


def test_age_0_gives_the_sync_run_s_rewards_and_losses_bit_for_bit(sync_run: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "grpo-tiny-moe-cpu-split.yaml"
    recipe.write_text(f"defaults: {ASYNC}\ngrpo: {{async_grpo: {{max_trajectory_age_steps: 0}}}}\n")
    done = run_recipe(recipe, tmp_path / "run", *SHORT, "grpo.max_num_steps=3", cwd=tmp_path)
    assert done.code == 0, done.text
    for name in ("train/reward", "train/loss", "train/grad_norm", "train/mean_tokens_per_sample"):
        assert [row[name] for row in metrics(tmp_path / "run")] == [row[name] for row in metrics(sync_run)[:3]]


def test_ages_are_0_then_1_and_a_resumed_run_goes_on_with_the_next_prompts(sync_run: Path, tmp_path: Path) -> None:
    saved = ("checkpointing.enabled=true", "checkpointing.save_hf=false")
    for steps, resume in ((2, ()), (4, ("--resume",))):
        arguments = (*SHORT, *saved, f"grpo.max_num_steps={steps}", *resume)
        done = run_recipe(ASYNC, tmp_path / "run", *arguments, cwd=tmp_path)
        assert done.code == 0, done.text
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    # The resumed run begins with fresh samples of the weights it loaded.
    assert [row["train/trajectory_age_max"] for row in rows] == [0, 1, 0, 1]
    assert [prompt_ids(tmp_path / "run", s) for s in range(1, 5)] == [prompt_ids(sync_run, s) for s in range(1, 5)]


def test_two_generators_share_the_prompts_and_sample_what_the_step_asks_for(sync_run: Path, tmp_path: Path) -> None:
    recipe = RECIPES / "grpo-tiny-moe-cpu-async-1off-2gen.yaml"
    done = run_recipe(recipe, tmp_path / "run", *SHORT, "grpo.max_num_steps=3", cwd=tmp_path)
    assert done.code == 0, done.text
    rows = metrics(tmp_path / "run")
    assert [row["train/trajectory_age_max"] for row in rows] == [0, 1, 1]
    assert [prompt_ids(tmp_path / "run", s) for s in range(1, 4)] == [prompt_ids(sync_run, s) for s in range(1, 4)]
    # The first step's samples are of the trainer's own weights, whichever engine drew them.
    assert rows[0]["train/token_mult_prob_error"] < 1.001
