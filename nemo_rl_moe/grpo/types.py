"""What the loss takes: one micro-batch of tokens, flat, and the counts it is divided by."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TokenBatch:
    """The T tokens of one micro-batch, without a padded layout, so packing and padding cannot change a value.

    All tokens of a sequence that count must be in the same micro-batch whenever a sequence is averaged over (sequence
    level ratios or loss, seq-mask-tis). Log-probabilities are natural logarithms at the sampling temperature. Values at
    tokens with mask 0 are never looked at and may be anything, NaN included.

    Attributes:
        logprobs: float32 [T], current policy; the loss is differentiated with respect to it.
        prev_logprobs: float32 [T], the policy that the rollout step started from, by the trainer. None is allowed only
            with `force_on_policy_ratio`, which takes `logprobs` without gradient.
        generation_logprobs: float32 [T], reported by the generator that sampled the tokens.
        reference_logprobs: float32 [T], frozen reference; None without a KL term.
        advantages: float32 [T], the sequence's advantage at each of its tokens.
        mask: float32 [T], 1 where the token counts and 0 elsewhere (token mask times sample mask).
        sequence_ids: int64 [T], 0 to num_sequences - 1.
        num_sequences: upper bound of sequence_ids; numbers without a token are fine.
        entropy: float32 [T], nats, of the current policy's next-token distribution; optional, for a metric only.
    """

    logprobs: Tensor
    prev_logprobs: Tensor | None
    generation_logprobs: Tensor
    reference_logprobs: Tensor | None
    advantages: Tensor
    mask: Tensor
    sequence_ids: Tensor
    num_sequences: int
    entropy: Tensor | None = None


@dataclass(frozen=True)
class GlobalCounts:
    """Denominators over the global batch of one optimizer step: all micro-batches and data-parallel ranks.

    Attributes:
        tokens: tokens that count in the loss.
        sequences: sequences with at least one such token.
    """

    tokens: float
    sequences: float
