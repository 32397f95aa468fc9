"""Which samples and groups enter the loss: dynamic sampling, overlong filtering, and a word when none does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_moe.errors import RunFailed


class DynamicSamplingExhausted(RunFailed):
    """The allowed generation batches did not give enough groups with unequal rewards."""


def uneven_groups(rewards: Tensor, group_ids: Tensor, valid: Tensor | None = None) -> Tensor:
    """Samples of groups whose rewards are not all equal (DAPO, arXiv:2503.14476, section 3.2).

    Decided for whole groups by their lowest and highest reward, never by a sample's own baseline or deviation: with a
    leave-one-out baseline the one success of [1, 0, 0, 0] has deviation 0 and would leave its group.

    Args:
        rewards: [N], as the verifier gave them; a penalty for length would make an all-failed group look uneven.
        group_ids: int64 [N].
        valid: [N], nonzero for samples that count; None for all.

    Returns:
        bool [N], equal within a group.
    """
    keep = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid.bool()
    _, group = torch.unique(group_ids, return_inverse=True)
    size = int(group.max()) + 1 if len(group) else 0
    infinity = float("inf")
    start = torch.full((size,), infinity, dtype=rewards.dtype, device=rewards.device)
    lowest = start.scatter_reduce(0, group, torch.where(keep, rewards, infinity), "amin")
    highest = (-start).scatter_reduce(0, group, torch.where(keep, rewards, -infinity), "amax")
    return (highest > lowest)[group]


def zero_std_fraction(rewards: Tensor, group_ids: Tensor) -> float:
    """Share of groups whose rewards are all equal, 0 to 1; 0 for no groups."""
    if rewards.numel() == 0:
        return 0.0
    uneven = uneven_groups(rewards, group_ids)
    return 1.0 - len(torch.unique(group_ids[uneven])) / len(torch.unique(group_ids))


@dataclass
class DynamicSampler:
    """Collects whole groups with unequal rewards over several generation batches of one step.

    Attributes:
        target_groups: groups that the step trains on.
        max_batches: generation batches at most.
        batches: generation batches seen.
        sampled: groups seen.
        equal: groups dropped because their rewards are all equal.
        surplus: uneven groups beyond the target.
        kept: groups kept.
    """

    target_groups: int
    max_batches: int
    batches: int = 0
    sampled: int = 0
    equal: int = 0
    surplus: int = 0
    kept: int = 0

    @property
    def done(self) -> bool:
        """Whether the target is reached."""
        return self.kept >= self.target_groups

    def add(self, rewards: Tensor, group_ids: Tensor, valid: Tensor | None = None) -> Tensor:
        """Takes a generation batch and chooses from it.

        Args:
            rewards: [N], not shaped.
            group_ids: int64 [N], distinct groups within this batch.
            valid: [N], nonzero for samples that count; None for all.

        Returns:
            int64 [K], rows to keep, ascending: whole groups, in order of id, no more than are still missing.

        Raises:
            DynamicSamplingExhausted: groups are missing after the last allowed batch; the message has all counts.
        """
        self.batches += 1
        uneven = uneven_groups(rewards, group_ids, valid)
        groups = torch.unique(group_ids)
        candidates = torch.unique(group_ids[uneven])
        chosen = candidates[: self.target_groups - self.kept]
        self.sampled += len(groups)
        self.equal += len(groups) - len(candidates)
        self.surplus += len(candidates) - len(chosen)
        self.kept += len(chosen)
        if not self.done and self.batches >= self.max_batches:
            raise DynamicSamplingExhausted(
                f"dynamic sampling found {self.kept} of {self.target_groups} groups with unequal rewards in "
                f"{self.batches} generation batches ({self.sampled} groups sampled, {self.equal} of them all equal); "
                f"raise grpo.dynamic_sampling_max_gen_batches, or use tasks that are neither always nor never solved"
            )
        return torch.isin(group_ids, chosen).nonzero().squeeze(1)

    def metrics(self) -> dict[str, float]:
        """Counts of the step: `dynamic_sampling_batches`, and groups sampled, equal and surplus."""
        return {
            "dynamic_sampling_batches": float(self.batches),
            "dynamic_sampling_groups": float(self.sampled),
            "dynamic_sampling_equal_groups": float(self.equal),
            "dynamic_sampling_surplus_groups": float(self.surplus),
        }


def overlong_mask(truncated: Tensor) -> Tensor:
    """float32 [N], 0 for responses that were cut at the length limit (bool [N]) and 1 for the others.

    Their reward says that the answer was missing, not that it was wrong (DAPO, arXiv:2503.14476, section 3.4).
    """
    return (~truncated.bool()).float()


def why_no_gradient(advantages: Tensor, sample_mask: Tensor, truncated: Tensor) -> str | None:
    """A warning when no sample can move the policy by its reward, else None.

    Args:
        advantages, sample_mask: [N].
        truncated: bool [N], for the text only.
    """
    total = len(advantages)
    used = sample_mask > 0
    cut = f"{int(truncated.sum())} of {total} responses were cut at the length limit"
    if not bool(used.any()):
        return f"no gradient: all {total} samples are masked ({cut})"
    if not bool((advantages[used] != 0).any()):
        return f"no gradient from rewards: every advantage is 0, each group's rewards are all equal ({cut})"
    return None
