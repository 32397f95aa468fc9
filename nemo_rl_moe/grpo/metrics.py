"""How far trainer and generator agree on the sampled tokens, and other diagnostics of one micro-batch.

Every function gives per-token values; the loss divides their sums by the global counts, so that shares of micro-batches
and ranks add up. Estimators do not depend on the recipe's KL type: a metric has one meaning in every run.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nemo_rl_moe.grpo.kl import k3
from nemo_rl_moe.grpo.tensors import bounded_exp


def agreement_metrics(train_logprobs: Tensor, generation_logprobs: Tensor) -> dict[str, Tensor]:
    """Per-token disagreement of trainer and generator; all finite for finite input.

    With d = train - generation log-probability, m = log of the mean of both probabilities, and k3(x) = e^x - 1 - x:

    - gen_kl_error: k3(d), estimates KL(generation || train) on tokens sampled by the generator.
    - policy_kl_error: k3(-d), the same estimator with the roles exchanged.
    - js_divergence_error: (k3(train - m) + k3(generation - m)) / 2, estimates the Jensen-Shannon divergence.
    - token_mult_prob_error: e^|d|, the factor between both probabilities; 1 is perfect.

    Args:
        train_logprobs, generation_logprobs: [T].

    Returns:
        float [T] each; the first three in nats.
    """
    difference = train_logprobs - generation_logprobs
    mixture = torch.logaddexp(train_logprobs, generation_logprobs) - math.log(2)
    return {
        "gen_kl_error": k3(difference),
        "policy_kl_error": k3(-difference),
        "js_divergence_error": 0.5 * (k3(train_logprobs - mixture) + k3(generation_logprobs - mixture)),
        "token_mult_prob_error": bounded_exp(difference.abs()),
    }


def approximate_entropy(logprobs: Tensor, generation_logprobs: Tensor) -> Tensor:
    """-w log p at each token [T], w = p / p_generation: estimates the policy's entropy (nats) from sampled tokens."""
    return -bounded_exp(logprobs - generation_logprobs) * logprobs


def extreme(values: Tensor, keep: Tensor, counts_tokens: float, *, largest: bool) -> Tensor:
    """Largest or smallest kept value [T] of a ratio.

    Without a kept token in this micro-batch it is the neutral element of max or min; without one in the whole global
    batch it is 1, a ratio that says "no change", so that no infinity is ever logged.
    """
    neutral = 1.0 if counts_tokens == 0 else -math.inf if largest else math.inf
    if values.numel() == 0:
        return torch.tensor(neutral, dtype=values.dtype, device=values.device)
    filled = torch.where(keep, values, torch.tensor(neutral, dtype=values.dtype, device=values.device))
    return filled.amax() if largest else filled.amin()
