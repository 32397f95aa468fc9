"""Changes to rewards before advantages: soft penalty for length, and linear scaling."""

from __future__ import annotations

import torch
from torch import Tensor


def overlong_penalty(
    response_lengths: Tensor, max_response_length: int, buffer_length: int, penalty: float = 1.0
) -> Tensor:
    """What to add to each reward for a response that comes close to the limit (DAPO, arXiv:2503.14476, equation 13).

    0 up to max_response_length - buffer_length, then falling linearly to -penalty at the limit, and -penalty beyond.

    Args:
        response_lengths: [N], tokens.
        max_response_length: the limit, tokens.
        buffer_length: tokens over which the penalty grows.
        penalty: taken at the limit, not negative.

    Returns:
        float32 [N], between -penalty and 0.

    Raises:
        ValueError: a buffer that is not between 1 and the limit.
    """
    if not 0 < buffer_length <= max_response_length:
        raise ValueError(f"buffer_length {buffer_length}, expected 1 to max_response_length {max_response_length}")
    excess = response_lengths.to(torch.float32) - (max_response_length - buffer_length)
    return -penalty * (excess / buffer_length).clamp(0.0, 1.0)


def scale_rewards(
    rewards: Tensor, source_min: float, source_max: float, target_min: float, target_max: float
) -> Tensor:
    """Clamps rewards [N] to the source range and maps it linearly to the target range.

    Returns:
        float32 [N].

    Raises:
        ValueError: source_min not below source_max.
    """
    if not source_min < source_max:
        raise ValueError(f"source_min {source_min} is not below source_max {source_max}")
    share = (rewards.double().clamp(source_min, source_max) - source_min) / (source_max - source_min)
    return (target_min + share * (target_max - target_min)).float()
