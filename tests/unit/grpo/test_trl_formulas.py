"""Risk guarded: results that cannot be set beside TRL's, because the shared subset of settings means something else.

The formulas are those that TRL documents for its GRPO trainer (https://huggingface.co/docs/trl/grpo_trainer: advantage,
KL and loss; loss types "dapo" and "grpo", importance_sampling_level, epsilon_high, delta), written here in numpy over
padded [B, L] arrays, the layout TRL uses and we do not.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nemo_rl_moe.grpo.advantages import EPSILON, group_advantages
from nemo_rl_moe.grpo.loss import grpo_loss
from nemo_rl_moe.grpo.types import GlobalCounts, TokenBatch
from nemo_rl_moe.recipe.schema import LossConfig

B, L = 6, 9
FIELDS = ("logps", "old", "ref", "sampling")


def padded_batch(seed: int) -> dict[str, np.ndarray]:
    """Right-padded completions of 1 to 9 tokens."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, L + 1, B)
    base = -rng.exponential(1.0, (B, L)) - 0.01
    near = {name: base + 0.3 * rng.standard_normal((B, L)) for name in FIELDS[1:]}
    mask = (np.arange(L) < lengths[:, None]).astype(float)
    return {"logps": base, **near, "mask": mask, "advantages": rng.standard_normal(B)}


def trl_loss(
    x: dict[str, np.ndarray],
    *,
    loss_type: str,
    level: str = "token",
    beta: float = 0.0,
    epsilon: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    cap: float | None = None,
) -> float:
    mask, lengths = x["mask"], x["mask"].sum(1, keepdims=True)
    log_weights = x["logps"] - x["old"]
    if level == "sequence":
        log_weights = (log_weights * mask).sum(1, keepdims=True) / lengths
    coefficient = np.exp(log_weights)
    clipped = np.clip(coefficient, 1 - epsilon, 1 + epsilon_high)
    if delta is not None:
        coefficient = np.minimum(coefficient, delta)
    a = x["advantages"][:, None]
    per_token = -np.minimum(coefficient * a, clipped * a)
    if cap is not None:
        per_token = per_token * np.minimum(np.exp(x["old"] - x["sampling"]), cap)
    difference = x["ref"] - x["logps"]
    per_token = (per_token + beta * (np.exp(difference) - difference - 1)) * mask
    if loss_type == "dapo":
        return float(per_token.sum() / mask.sum())
    return float((per_token.sum(1, keepdims=True) / lengths).mean())


def our_loss(x: dict[str, np.ndarray], **config) -> float:
    rows, columns = np.nonzero(x["mask"])
    flat = {name: torch.tensor(x[name][rows, columns]) for name in FIELDS}
    batch = TokenBatch(
        logprobs=flat["logps"].requires_grad_(),
        prev_logprobs=flat["old"],
        generation_logprobs=flat["sampling"],
        reference_logprobs=flat["ref"],
        advantages=torch.tensor(x["advantages"][rows]),
        mask=torch.ones(len(rows), dtype=torch.float64),
        sequence_ids=torch.tensor(rows),
        num_sequences=B,
    )
    config = {"kl_input_clamp_value": None, "kl_output_clamp_value": None, **config}
    return grpo_loss(LossConfig(**config), batch, GlobalCounts(float(len(rows)), float(B)))[0].item()


PAIRS = {
    "dapo token mean": ({"loss_type": "dapo"}, {"reference_policy_kl_penalty": 0.0}),
    "grpo sample mean": (
        {"loss_type": "grpo", "beta": 0.04},
        {"token_level_loss": False, "reference_policy_kl_penalty": 0.04},
    ),
    "clip-higher and delta": (
        {"loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.28, "delta": 1.4, "beta": 0.1},
        {
            "ratio_clip_min": 0.1,
            "ratio_clip_max": 0.28,
            "ratio_clip_c": 1.4,
            "reference_policy_kl_penalty": 0.1,
        },
    ),
    "gspo": (
        {"loss_type": "grpo", "level": "sequence", "epsilon": 0.05, "epsilon_high": 0.08},
        {
            "token_level_loss": False,
            "sequence_level_importance_ratios": True,
            "ratio_clip_min": 0.05,
            "ratio_clip_max": 0.08,
            "reference_policy_kl_penalty": 0.0,
        },
    ),
    "truncated importance sampling, cap 1.2": (
        {"loss_type": "dapo", "cap": 1.2, "beta": 0.04},
        {
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_type": "tis",
            "truncated_importance_sampling_ratio": 1.2,
            "reference_policy_kl_penalty": 0.04,
        },
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_loss_equals_trl_s_documented_formula_to_1e_12_for_10_draws(name):
    theirs, config = PAIRS[name]
    for seed in range(10):
        x = padded_batch(seed)
        assert our_loss(x, **config) == pytest.approx(trl_loss(x, **theirs), abs=1e-12)


def test_whole_group_advantages_equal_trl_s_up_to_its_epsilon_of_1e_4_in_place_of_1e_6():
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [0.2, 0.9, 0.4, 0.4], [0.5, 0.5, 0.5, 0.5]])
    centred = rewards - rewards.mean(1, keepdims=True)
    std = rewards.std(1, ddof=1, keepdims=True)
    found = group_advantages(
        torch.tensor(rewards.ravel()), torch.arange(3).repeat_interleave(4), leave_one_out=False, normalize=True
    )
    assert found.tolist() == pytest.approx((centred / (std + EPSILON)).ravel().tolist(), abs=1e-6)
    assert found.tolist() == pytest.approx((centred / (std + 1e-4)).ravel().tolist(), abs=1e-3)
