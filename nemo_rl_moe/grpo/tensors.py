"""Sums over sequences of flat tokens, and exponentials that stay finite."""

from __future__ import annotations

import torch
from torch import Tensor

EXPONENT_LIMIT = 20.0
"""Log-ratios are exponentiated up to this: e^20 is 4.9e8, whose square a float32 gradient norm still holds."""

LOGPROB_FLOOR = -1e5
"""Stands for log 0, so that the difference of two impossible tokens is 0 and not NaN."""


def where_kept(keep: Tensor, values: Tensor) -> Tensor:
    """Values [T] where keep (bool [T]) is True and 0 elsewhere.

    A product with the mask would turn an infinite value at a masked token into NaN, in the value and in the gradient.
    """
    return torch.where(keep, values, torch.zeros((), dtype=values.dtype, device=values.device))


def kept_logprobs(keep: Tensor, logprobs: Tensor) -> Tensor:
    """Log-probabilities [T] with masked tokens at 0 and -inf at LOGPROB_FLOOR. NaN stays, so that a fault is seen."""
    return where_kept(keep, logprobs).clamp(min=LOGPROB_FLOOR)


def bounded_exp(log_values: Tensor) -> Tensor:
    """exp of values clamped to plus or minus EXPONENT_LIMIT; the gradient is 0 beyond it."""
    return log_values.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()


def sequence_sum(values: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """Sums [num_sequences] of the tokens' values [T] within each sequence; 0 for a sequence without tokens."""
    return values.new_zeros(num_sequences).index_add(0, sequence_ids, values)


def sequence_mean(values: Tensor, mask: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """Means [num_sequences] over the tokens with mask 1; 0 for a sequence without any."""
    total = sequence_sum(values * mask, sequence_ids, num_sequences)
    return total / sequence_sum(mask, sequence_ids, num_sequences).clamp(min=1)
