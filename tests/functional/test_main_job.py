"""Risk guarded: a user's first run on a fresh machine: it ends, it is complete, and it can be repeated."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from nemo_rl_moe.generation.generator import Generator
from nemo_rl_moe.policy.policy import Policy
from nemo_rl_moe.tracking.definitions import assert_known
from tests.functional.cli import MODEL, TINY, Outcome, metrics, nemo_rl_moe, run_recipe

SHORT = (
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "grpo.max_num_steps=3",
    "grpo.val_period=2",
    "grpo.max_val_samples=5",
    "grpo.val_batch_size=3",
)
EVERY_STEP = (
    *(
        f"timing/train/{phase}"
        for phase in (
            "total_step_time",
            "generation",
            "policy_and_reference_logprobs",
            "policy_training",
            "weight_sync",
            "exposed_generation",
            "reward",
            "data",
        )
    ),
    *(
        f"performance/{name}"
        for name in (
            "tokens_per_sec_per_gpu",
            "policy_training_tokens_per_sec_per_gpu",
            "policy_and_reference_logprobs_tokens_per_sec_per_gpu",
            "generation_tokens_per_sec_per_gpu",
            "train_flops_per_gpu",
            "total_num_tokens",
        )
    ),
    *(
        f"train/{name}"
        for name in (
            "reward",
            "loss",
            "grad_norm",
            "lr",
            "gen_kl_error",
            "policy_kl_error",
            "token_mult_prob_error",
            "probs_ratio",
            "approx_entropy",
            "mean_tokens_per_sample",
            "truncated_fraction",
            "zero_std_fraction",
            "trajectory_age_max",
            "weight_version",
        )
    ),
    "policy/padding_fraction",
    "policy/memory_peak_gib",
)


def hub_cache(folder: Path) -> str:
    """A hub cache that holds the tiny model as `tiny/moe-cpu`."""
    model = folder / "models--tiny--moe-cpu"
    for part in ("refs", "snapshots"):
        (model / part).mkdir(parents=True)
    commit = "0" * 40
    (model / "refs/main").write_text(commit)
    (model / "snapshots" / commit).symlink_to(MODEL)
    return str(folder)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """Three steps of the recipe in a process of its own; the model is a hub id, and the hub cannot be reached."""
    folder = tmp_path_factory.mktemp("first")
    wandb = ("logger.wandb_enabled=true", "logger.wandb.mode=offline", "logger.tensorboard_enabled=true")
    settings = (f"logger.log_dir={folder / 'run'}", "policy.model_name=tiny/moe-cpu", *SHORT, *wandb)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HF_HUB_CACHE", hub_cache(folder / "hub"))
        patched.setenv("HF_HUB_OFFLINE", "1")
        return folder / "run", nemo_rl_moe("run", TINY, *settings, cwd=folder)


def test_three_steps_end_with_exit_code_0_and_one_line_for_each_step(first: tuple[Path, Outcome]) -> None:
    _, outcome = first
    assert outcome.code == 0, outcome.text
    assert [f"step {i}/3" in outcome.stdout for i in (1, 2, 3)] == [True] * 3


def test_metrics_hold_every_name_of_the_contract_at_each_of_3_steps(first: tuple[Path, Outcome]) -> None:
    rows = metrics(first[0])
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert [name for name in EVERY_STEP if not isinstance(row.get(name), int | float)] == []
        assert all(math.isfinite(row[name]) for name in EVERY_STEP)
        assert 0 <= row["policy/padding_fraction"] < 1
        # Torch and Megatron alone take more than 0.1 GiB; the tiny model adds next to nothing.
        assert 0.1 < row["policy/memory_peak_gib"] < 8
        assert_known(name for name in row if name != "step")


def test_versions_are_1_2_3_and_sync_samples_have_age_0(first: tuple[Path, Outcome]) -> None:
    rows = metrics(first[0])
    assert [row["train/weight_version"] for row in rows] == [1, 2, 3]
    assert [row["train/trajectory_age_max"] for row in rows] == [0, 0, 0]


def test_validation_scores_all_5_prompts_although_batches_hold_3(first: tuple[Path, Outcome]) -> None:
    validated = [row for row in metrics(first[0]) if "validation/accuracy" in row]
    assert [row["step"] for row in validated] == [2]
    row = validated[0]
    assert row["validation/num_samples"] == 5
    assert row["validation/accuracy/arithmetic"] == row["validation/accuracy"]
    assert (row["validation/reward_errors"], row["validation/reward_timeouts"]) == (0, 0)


def test_trainer_and_generator_agree_in_float32_to_1e_4(first: tuple[Path, Outcome]) -> None:
    for row in metrics(first[0]):
        assert row["train/gen_kl_error"] < 1e-8
        assert abs(row["train/token_mult_prob_error"] - 1) < 1e-4


def test_phases_add_up_to_the_step_time(first: tuple[Path, Outcome]) -> None:
    for row in metrics(first[0]):
        timing = {k.removeprefix("timing/train/"): v for k, v in row.items() if k.startswith("timing/train/")}
        total = timing.pop("total_step_time")
        del timing["exposed_generation"]  # the same seconds as generation when nothing runs ahead
        assert sum(timing.values()) == pytest.approx(total, abs=1e-3)


def test_the_run_directory_is_complete(first: tuple[Path, Outcome]) -> None:
    folder = first[0]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["exit_code"], manifest["reason"]) == (0, "done")
    assert {"torch", "ray", "megatron-core", "transformers"} <= set(manifest["versions"])
    assert yaml.safe_load((folder / "config.yaml").read_text())["grpo"]["max_num_steps"] == 3
    samples = [json.loads(line) for line in (folder / "rollouts/step_1.jsonl").read_text().splitlines()]
    assert len(samples) == 4
    assert {"problem", "response", "reward"} <= set(samples[0])
    assert list((folder / "wandb").glob("offline-run-*"))
    assert list((folder / "tensorboard").glob("events*"))


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The same again in this process, with the order of what was asked of trainer and generator."""
    folder, asked = tmp_path_factory.mktemp("second"), []

    def noted(kind: type, method: str) -> Callable[..., object]:
        real = getattr(kind, method)

        def note(self: object, *args: object, **kwargs: object) -> object:
            asked.append(" ".join([method, *args[0]]) if method == "wake" else method)
            return real(self, *args, **kwargs)

        return note

    with pytest.MonkeyPatch.context() as patched:
        for kind, method in (
            *((Generator, name) for name in ("generate", "sleep", "wake", "update_weights")),
            *((Policy, name) for name in ("logprobs", "train", "export_weights")),
        ):
            patched.setattr(kind, method, noted(kind, method))
        outcome = run_recipe(TINY, folder / "run", *SHORT, cwd=folder)
    assert outcome.code == 0, outcome.text
    return folder / "run", asked


def test_a_second_run_of_the_same_seed_gives_the_same_rewards_and_losses(
    first: tuple[Path, Outcome], second: tuple[Path, list[str]]
) -> None:
    for name in ("train/reward", "train/loss", "train/grad_norm"):
        assert [row[name] for row in metrics(second[0])] == [row[name] for row in metrics(first[0])]


def test_the_generator_sleeps_whenever_the_trainer_works_and_is_woken_in_two_parts_around_the_update(
    second: tuple[Path, list[str]],
) -> None:
    refit = ["wake weights", "export_weights", "update_weights", "wake kv_cache"]
    step = ["generate", "sleep", "logprobs", "logprobs", "train", *refit]
    validation = ["generate", "generate"]
    assert second[1] == [*refit, *step, *step, *validation, *step]
