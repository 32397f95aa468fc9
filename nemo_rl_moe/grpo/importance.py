"""Correction for tokens that were sampled by other weights or another engine than the trainer's."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from nemo_rl_moe.grpo.tensors import bounded_exp, kept_logprobs, sequence_mean, sequence_sum

TruncationType = Literal["tis", "icepop", "seq-mask-tis"]


def importance_weights(
    train_logprobs: Tensor,
    generation_logprobs: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    *,
    truncation: TruncationType | None = None,
    upper: float | None = None,
    lower: float | None = None,
    sequence_level: bool = False,
) -> tuple[Tensor, Tensor]:
    """Weights w = exp(train - generation log-probability) of each token, detached.

    With `sequence_level` every token of a sequence has the product of its tokens' weights. Treatment of weights
    outside of [lower, upper] (a missing `lower` is 0):

    - None: kept as they are.
    - tis: min(w, upper) (truncated importance sampling, https://fengyao.notion.site/off-policy-rl).
    - icepop: 0 outside (IcePop, arXiv:2510.18855).
    - seq-mask-tis: the whole sequence is 0 when the geometric mean of its tokens' weights is outside; w kept otherwise.

    A weight that is not a number becomes 0, and exponents stop at plus or minus 20, so the result is always finite.

    Args:
        train_logprobs, generation_logprobs, mask: [T]. Masked tokens do not matter.
        sequence_ids: int64 [T], below num_sequences.

    Returns:
        Weights [T], and bool [T]: True where the weight was outside of the bounds or not a number.

    Raises:
        ValueError: truncation without an upper bound, or lower above upper.
    """
    if truncation is not None and upper is None:
        raise ValueError(f"truncation {truncation!r} needs an upper bound")
    low, high = 0.0 if lower is None else lower, math.inf if upper is None else upper
    if low > high:
        raise ValueError(f"lower bound {low} above upper bound {high}")
    keep = mask > 0
    kept = mask.detach()
    log_weights = (kept_logprobs(keep, train_logprobs) - kept_logprobs(keep, generation_logprobs)).detach()
    raw = log_weights
    if sequence_level:
        raw = sequence_sum(log_weights * kept, sequence_ids, num_sequences)[sequence_ids]
    weights = bounded_exp(raw)
    outside = weights.isnan()
    if truncation == "tis":
        outside = outside | (weights > high)
        weights = weights.clamp(max=high)
    elif truncation == "icepop":
        outside = outside | (weights > high) | (weights < low)
        weights = weights.masked_fill(outside, 0.0)
    elif truncation == "seq-mask-tis":
        mean = bounded_exp(sequence_mean(log_weights, kept, sequence_ids, num_sequences))[sequence_ids]
        outside = outside | ~((mean >= low) & (mean <= high))
        weights = weights.masked_fill(outside, 0.0)
    return torch.nan_to_num(weights, nan=0.0), outside & keep


def sequence_error_mask(
    train_logprobs: Tensor,
    generation_logprobs: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    threshold: float | None,
) -> Tensor:
    """Leaves out sequences on which trainer and generator disagree.

    A sequence stays when the mean over its tokens of exp|generation - train log-probability| is at most the threshold
    (1 is perfect agreement). A mean that is not a number does not stay; a sequence without tokens does.

    Returns:
        float32 [num_sequences], 1 for a sequence that stays; all ones for threshold None.
    """
    if threshold is None:
        return torch.ones(num_sequences, dtype=torch.float32, device=mask.device)
    keep = mask > 0
    difference = kept_logprobs(keep, generation_logprobs) - kept_logprobs(keep, train_logprobs)
    error = sequence_mean(bounded_exp(difference.abs()), mask, sequence_ids, num_sequences)
    return (error <= threshold).float()
