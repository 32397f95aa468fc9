"""Advantages within groups of responses to the same prompt.

Departures from the published formulas, all for samples on which those give noise or overflow: sums run in float64, and
a standard deviation below 1e-6 of its group's reward range counts as 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""

RELATIVE_ZERO = 1e-6
"""Spread within a group, relative to the group's range, that is taken for rounding noise."""


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    leave_one_out: bool,
    normalize: bool,
    valid: Tensor | None = None,
) -> Tensor:
    """Advantage of each sample over its group: A_i = r_i - b_i, or (r_i - b_i) / (s_i + 1e-6) when normalised.

    For a sample i in a group with the valid samples V:

    - leave_one_out: b_i is the mean over V without i (RLOO, arXiv:2402.14740), and s_i the unbiased standard deviation
      over V without i, with |V| - 2 in its denominator: each sample has its own.
    - otherwise: b_i and s_i are the mean and the unbiased standard deviation over V, denominator |V| - 1 (GRPO,
      arXiv:2402.03300).

    Where s_i is 0, below 1e-6 of the group's reward range, or undefined (one other sample), the advantage stays
    undivided: r_i - b_i. So a group with equal rewards has advantage 0, and no sample's is blown up by rounding noise.
    A group with one valid sample and a sample that is not valid have advantage 0.

    Args:
        rewards: [N], finite.
        group_ids: int64 [N], which occurrence of a prompt a sample answers. The same prompt drawn twice in a batch has
            two ids: two groups, each with a baseline of its own. Samples of a group need not be adjacent.
        valid: [N], nonzero for samples that count; None for all.

    Returns:
        float32 [N], always finite: values beyond float32 are set to its largest.

    Raises:
        ValueError: shapes differ, or a reward is not finite.
    """
    keep = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid.bool()
    if rewards.dim() != 1 or group_ids.shape != rewards.shape or keep.shape != rewards.shape:
        shapes = [tuple(t.shape) for t in (rewards, group_ids, keep)]
        raise ValueError(f"rewards, group_ids and valid have shapes {shapes}, expected [N] each")
    if rewards.numel() == 0:
        return rewards.float()
    if not bool(rewards[keep].isfinite().all()):
        row = int((~rewards.isfinite() & keep).nonzero()[0])
        raise ValueError(f"reward of sample {row} is {float(rewards[row])}, expected a finite number")
    group, slot, shape = _layout(group_ids)
    present = torch.zeros(shape, dtype=torch.bool, device=rewards.device)
    present[group, slot] = keep
    table = torch.zeros(shape, dtype=torch.float64, device=rewards.device)
    table[group, slot] = torch.where(keep, rewards, 0).double()
    advantages = _table_advantages(table, present, leave_one_out, normalize)[group, slot]
    limit = torch.finfo(torch.float32).max
    return advantages.clamp(-limit, limit).float()


def clip_advantages(advantages: Tensor, low: float | None, high: float | None) -> Tensor:
    """Advantages [N] raised to at least `low` and lowered to at most `high`; None leaves that side open."""
    return advantages if low is None and high is None else advantages.clamp(low, high)


def _layout(group_ids: Tensor) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Row and column of each sample in a table of [groups, largest group], and the table's shape."""
    _, group, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    order = torch.argsort(group, stable=True)
    starts = sizes.cumsum(0) - sizes
    slot = torch.empty_like(group)
    slot[order] = torch.arange(len(group), device=group.device) - starts[group[order]]
    return group, slot, (len(sizes), int(sizes.max()))


def _table_advantages(rewards: Tensor, present: Tensor, leave_one_out: bool, normalize: bool) -> Tensor:
    """Advantages [P, G] of rewards float64 [P, G] where present, 0 elsewhere."""
    infinity = float("inf")
    # From the group's lowest reward on, so that equal rewards are exactly 0 and a large offset costs no digits.
    lowest = torch.where(present, rewards, infinity).amin(1, keepdim=True)
    above = torch.where(present, rewards - lowest, 0)
    # [P, G, G]: whose rewards make up the baseline of whom. Sums over the others themselves, not the total minus one's
    # own: next to one huge reward that difference would keep no digit of the rest.
    others = present[:, None, :].expand(-1, present.shape[1], -1)
    if leave_one_out:
        others = others & ~torch.eye(present.shape[1], dtype=torch.bool, device=present.device)
    count = others.sum(2)
    theirs = above[:, None, :]
    mean = torch.where(others, theirs, 0).sum(2) / count.clamp(min=1)
    advantage = above - mean
    if normalize:
        deviation = torch.where(others, theirs - mean[:, :, None], 0)
        std = (deviation.square().sum(2) / (count - 1).clamp(min=1)).sqrt()
        usable = (count > 1) & (std > RELATIVE_ZERO * above.amax(1, keepdim=True))
        advantage = torch.where(usable, advantage / (std + EPSILON), advantage)
    # A sample alone in its group is the group's lowest and has no others: 0 above it, baseline 0.
    return torch.where(present, advantage, 0)
