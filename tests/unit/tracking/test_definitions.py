"""One definition for each metric, and a page that is current."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nemo_rl_moe.grpo.loss import grpo_loss
from nemo_rl_moe.grpo.sampling import DynamicSampler
from nemo_rl_moe.grpo.types import GlobalCounts, TokenBatch
from nemo_rl_moe.recipe.schema import LossConfig
from nemo_rl_moe.tracking.definitions import METRICS, assert_known, find, markdown
from nemo_rl_moe.tracking.throughput import throughput
from nemo_rl_moe.tracking.timers import PhaseTimer

REPOSITORY = Path(__file__).resolve().parents[3]
CONTRACT = [
    "timing/train/total_step_time",
    "timing/train/generation",
    "timing/train/policy_and_reference_logprobs",
    "timing/train/policy_training",
    "timing/train/weight_sync",
    "timing/train/exposed_generation",
    "timing/train/reward",
    "timing/train/data",
    "performance/tokens_per_sec_per_gpu",
    "performance/policy_training_tokens_per_sec_per_gpu",
    "performance/policy_and_reference_logprobs_tokens_per_sec_per_gpu",
    "performance/generation_tokens_per_sec_per_gpu",
    "performance/train_flops_per_gpu",
    "performance/total_num_tokens",
    "train/reward",
    "train/loss",
    "train/grad_norm",
    "train/lr",
    "train/gen_kl_error",
    "train/policy_kl_error",
    "train/token_mult_prob_error",
    "train/probs_ratio",
    "train/approx_entropy",
    "train/mean_tokens_per_sample",
    "train/truncated_fraction",
    "train/zero_std_fraction",
    "train/trajectory_age_max",
    "train/weight_version",
    "validation/accuracy",
    "validation/num_samples",
]


def test_all_30_names_that_users_rely_on_have_a_definition() -> None:
    assert len(CONTRACT) == 30
    assert_known(CONTRACT)


def test_no_name_is_defined_twice_and_every_entry_says_unit_definition_and_reducer() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    for metric in METRICS:
        assert metric.unit and metric.reducer, metric.name
        assert metric.definition.endswith("."), metric.name


def test_every_metric_of_the_loss_the_sampler_the_timer_and_the_rates_is_defined() -> None:
    zeros = torch.zeros(2)
    batch = TokenBatch(zeros.requires_grad_(), zeros, zeros, zeros, zeros, torch.ones(2), torch.tensor([0, 1]), 2)
    _, losses = grpo_loss(LossConfig(), batch, GlobalCounts(2.0, 2.0))
    timer = PhaseTimer()
    timer.start()
    timing = timer.step()
    assert_known(f"train/{name}" for name in losses)
    assert_known(f"train/{name}" for name in DynamicSampler(1, 1).metrics())
    assert_known(timing)
    assert_known(throughput(1, timing, 1, 1, 1, train_flops=1.0))


def test_a_family_covers_its_members_and_nothing_else() -> None:
    assert find("validation/accuracy/sums") is find("validation/accuracy/<env>")
    assert find("validation/accuracy/") is None
    assert find("validation/accuracy_of") is None


def test_an_undefined_name_is_an_error_with_the_nearest_defined_one() -> None:
    with pytest.raises(AssertionError, match=r"train/gradnorm \(nearest: train/grad_norm\)"):
        assert_known(["train/reward", "train/gradnorm"])


def test_docs_metrics_md_is_what_the_table_gives() -> None:
    assert (REPOSITORY / "docs/metrics.md").read_text(encoding="utf-8") == markdown(), "run `make docs`"


def test_the_table_imports_neither_torch_nor_ray() -> None:
    code = "import sys, nemo_rl_moe.tracking.definitions; print(sorted({'torch', 'ray', 'wandb'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
