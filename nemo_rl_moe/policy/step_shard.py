"""One rank's part of one optimizer step, and which of its tokens count. Made on the driver, used on the ranks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from nemo_rl_moe.batch import ROUTED_EXPERTS, SequenceBatch
from nemo_rl_moe.grpo.types import GlobalCounts
from nemo_rl_moe.policy.packing import RankShard

TRAINED_VALUES = ("advantages", "generation_logprobs", "prev_logprobs", "reference_logprobs", ROUTED_EXPERTS)


@dataclass(frozen=True)
class StepShard:
    """One rank's part of one optimizer step.

    Attributes:
        shard: its sequences and micro-batches. Token values: `advantages`, `generation_logprobs`, `prev_logprobs`
            (unless the loss forces the on-policy ratio), `reference_logprobs` (when the loss has a KL term),
            `routed_experts` (with router replay). Sample value: `sample_mask`.
        counts: tokens and sequences in the loss over the global batch of the step.
    """

    shard: RankShard
    counts: GlobalCounts


def loss_mask(batch: SequenceBatch) -> np.ndarray:
    """bool [T]: tokens that count in the loss. The first token of a sequence never does: nothing predicts it."""
    mask = batch.token_mask.copy()
    mask[batch.offsets[:-1]] = False
    sample_mask = batch.sample_values.get("sample_mask")
    if sample_mask is not None:
        mask &= np.repeat(sample_mask > 0, batch.lengths)
    return mask


def count_loss_tokens(batch: SequenceBatch) -> GlobalCounts:
    """Tokens in the loss, and sequences with at least one."""
    mask, offsets = loss_mask(batch), batch.offsets.tolist()
    counting = sum(bool(mask[start:end].any()) for start, end in itertools.pairwise(offsets))
    return GlobalCounts(tokens=float(np.count_nonzero(mask)), sequences=float(counting))
