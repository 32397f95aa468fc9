"""Model FLOPs of training, counted from the model's config, term by term.

The count is the one that published Megatron results use, so that TFLOP/s can be compared with theirs (closed form of
Megatron-LM's training.py and Megatron-Bridge's flop_utils.py): matrix products only, two operations a multiply-add,
backward twice forward, causal attention (a token attends to half the sequence on average), the experts that a token is
routed to, no router, no embedding lookup, no norms, and nothing for recomputation. Checked against it: 23.006 GFLOP a
token for Qwen3-30B-A3B and 148.035 for Qwen3-235B-A22B, both at 4096 tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_moe.bench.flops.families import TERMS, Work

_FORWARD_AND_BACKWARD = 3
_MULTIPLY_ADD = 2


@dataclass(frozen=True)
class Term:
    """One part of the model.

    Args:
        name: what is multiplied, such as `routed experts`.
        per_token: multiply-adds of one token in one forward pass.
        per_pair: multiply-adds of one (query, key) pair in one forward pass; 0 but for attention.
    """

    name: str
    per_token: float
    per_pair: float = 0.0

    def training_flops(self, tokens: int, pairs: float) -> float:
        """FLOPs of forward and backward over so many tokens and attended pairs."""
        return _FORWARD_AND_BACKWARD * _MULTIPLY_ADD * (tokens * self.per_token + pairs * self.per_pair)


@dataclass(frozen=True)
class ModelFlops:
    """The count of one model: its terms, in the order of the forward pass.

    Args:
        mtp_layers: multi-token-prediction layers in the terms.
        notes: where the count departs from the model itself.
    """

    terms: tuple[Term, ...]
    mtp_layers: int = 0
    notes: tuple[str, ...] = ()


class UnknownFamily(ValueError):
    """A config.json of a family that is not counted, or without a size that the count needs."""


def model_flops(config: Mapping[str, Any], mtp_layers: int = 0) -> ModelFlops:
    """Count of a model.

    Args:
        config: a Hugging Face config.json: llama, qwen3, qwen3_moe, deepseek_v3 or nemotron_h.
        mtp_layers: multi-token-prediction layers that are trained along, each with its own pass through the output
            matrix.

    Raises:
        UnknownFamily: another family, or a size is missing.
    """
    family = config.get("model_type")
    if family not in TERMS:
        raise UnknownFamily(f"model_type {family!r} is not counted, only {', '.join(sorted(TERMS))}")
    try:
        work: Work = TERMS[family](config, mtp_layers)
    except (KeyError, IndexError, TypeError) as missing:
        raise UnknownFamily(f"config of family {family}: no usable {missing}") from None
    terms = (Term(name, *sizes) for name, sizes in work.terms.items())
    return ModelFlops(tuple(term for term in terms if term.per_token or term.per_pair), mtp_layers, tuple(work.notes))


def attended_pairs(lengths: Sequence[int]) -> float:
    """(query, key) pairs of one causal layer: half the sum of squared lengths, each sequence by itself."""
    return sum(int(length) ** 2 for length in lengths) / 2


def training_flops(count: ModelFlops, lengths: Sequence[int]) -> float:
    """FLOPs of forward and backward over sequences of the given lengths (tokens, without padding), each on its own.

    Packing changes nothing: a packed sequence attends to itself only.
    """
    tokens, pairs = sum(int(length) for length in lengths), attended_pairs(lengths)
    return sum(term.training_flops(tokens, pairs) for term in count.terms)


def training_flops_per_token(count: ModelFlops, sequence_length: int) -> float:
    """Mean training FLOPs of a token in sequences of one length."""
    return training_flops(count, [sequence_length]) / sequence_length
