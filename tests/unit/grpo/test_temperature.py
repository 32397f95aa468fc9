"""Risk guarded: a sampling temperature on one side only looks like a policy that moved."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_rl_moe.grpo.loss import grpo_loss
from nemo_rl_moe.grpo.types import GlobalCounts, TokenBatch
from nemo_rl_moe.recipe.schema import LossConfig

LOGITS, T = torch.tensor([2.0, 0.0]), 0.5
AT_T = torch.log_softmax(LOGITS / T, 0)
RAW = torch.log_softmax(LOGITS, 0)


def metrics(train: torch.Tensor, generation: torch.Tensor) -> dict[str, float]:
    ids, ones = torch.zeros(2, dtype=torch.int64), torch.ones(2)
    batch = TokenBatch(train, generation, generation, generation, ones, ones, ids, 1)
    return {k: v.item() for k, v in grpo_loss(LossConfig(), batch, GlobalCounts(2, 1))[1].items()}


def test_logits_2_and_0_at_temperature_0_5_are_minus_0_0181_and_minus_4_0181():
    assert AT_T.tolist() == pytest.approx([-0.0181, -4.0181], abs=1e-4)
    assert RAW.tolist() == pytest.approx([-0.1269, -2.1269], abs=1e-4)


def test_identical_weights_at_the_same_temperature_have_ratio_1_and_error_1():
    found = metrics(AT_T, AT_T)
    assert found["probs_ratio"] == found["token_mult_prob_error"] == found["sampling_importance_ratio"] == 1.0
    assert found["gen_kl_error"] == 0.0


@pytest.mark.parametrize("wrong", [RAW, RAW / T])
def test_a_temperature_missing_or_dividing_log_probabilities_shows_as_a_ratio_off_1_by_more_than_0_1(wrong):
    found = metrics(wrong, AT_T)
    expected = (wrong - AT_T).exp()
    assert found["probs_ratio_max"] == pytest.approx(expected.max().item())
    assert max(abs(math.log(r)) for r in (found["probs_ratio_max"], found["probs_ratio_min"])) > 0.1
