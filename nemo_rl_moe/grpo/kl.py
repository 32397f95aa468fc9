"""Per-token estimators of KL(policy || reference) from tokens that the policy sampled."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from nemo_rl_moe.grpo.tensors import EXPONENT_LIMIT

KlType = Literal["k1", "k2", "k3"]


def kl_estimate(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    kl_type: KlType = "k3",
    input_clamp: float | None = None,
    output_clamp: float | None = None,
) -> Tensor:
    """Estimates KL at each token, with x = reference_logprobs - logprobs.

    k1 = -x, k2 = x^2 / 2, k3 = e^x - 1 - x (http://joschu.net/blog/kl-approx.html). x is clamped to plus or minus
    `input_clamp` first and the estimate to plus or minus `output_clamp` last; a clamped token has gradient 0.

    Without clamps k3 follows its tangent above x = 20, since e^x leaves float32 at 88.7. The tangent keeps value and
    gradient continuous, finite, and of the right sign; merely capping the exponential would leave the gradient of -x,
    which pushes the policy away from the reference.

    Args:
        logprobs: [T], finite or NaN.
        reference_logprobs: [T], finite or NaN.

    Returns:
        [T], in nats, not negative for k2 and k3.

    Raises:
        ValueError: for another kl_type.
    """
    x = reference_logprobs - logprobs
    if input_clamp is not None:
        x = x.clamp(-input_clamp, input_clamp)
    if kl_type == "k1":
        estimate = -x
    elif kl_type == "k2":
        estimate = x.square() / 2
    elif kl_type == "k3":
        estimate = k3(x)
    else:
        raise ValueError(f"KL estimator {kl_type!r}, expected k1, k2 or k3")
    return estimate if output_clamp is None else estimate.clamp(-output_clamp, output_clamp)


def k3(x: Tensor) -> Tensor:
    """e^x - 1 - x, continued by its tangent above EXPONENT_LIMIT; same shape as x.

    expm1 keeps the digits that e^x - 1 loses where both log-probabilities nearly agree, which is the usual case.
    """
    below = x.clamp(max=EXPONENT_LIMIT)
    return torch.expm1(below) - below + math.expm1(EXPONENT_LIMIT) * (x - below)
