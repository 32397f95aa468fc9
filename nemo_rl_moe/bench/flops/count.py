"""Model FLOPs of training, counted from the model's shape.

The count is the one that published Megatron results use, so that TFLOP/s can be compared with theirs: matrix products
only, two operations a multiply-add, backward twice forward, causal attention (a token attends to half the sequence on
average), the experts a token is routed to, no router, no embedding lookup, no norms, and nothing for recomputation.
Checked against it: 23.006 GFLOP a token for Qwen3-30B-A3B and 148.035 for Qwen3-235B-A22B, both at 4096 tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_moe.recipe.memory.parameters import has_experts

_FORWARD_AND_BACKWARD = 3
_MULTIPLY_ADD = 2
_SWIGLU_MATRICES = 3


@dataclass(frozen=True)
class DecoderShape:
    """What the count needs of a decoder with grouped-query attention and SwiGLU layers, dense or mixture-of-experts.

    Args:
        num_dense_layers, num_moe_layers: layers of each kind.
        hidden_size: width of the residual stream.
        query_size: query heads x head size.
        kv_size: key/value heads x head size.
        dense_ffn_size: inner width of dense layers.
        expert_ffn_size: inner width of one expert.
        experts_per_token: experts that a token is routed to.
        shared_ffn_size: inner width of the shared expert of each MoE layer; 0 without one.
        vocab_size: rows of the output matrix, as padded for the trainer.
    """

    num_dense_layers: int
    num_moe_layers: int
    hidden_size: int
    query_size: int
    kv_size: int
    dense_ffn_size: int
    expert_ffn_size: int
    experts_per_token: int
    shared_ffn_size: int
    vocab_size: int

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DecoderShape:
        """From a Hugging Face config.json of the Qwen3 and Qwen3-MoE families.

        Raises:
            KeyError: a size is missing, so the config is of another kind.
        """
        layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
        head_size = config.get("head_dim") or config["hidden_size"] // heads
        experts = config.get("num_experts", config.get("num_local_experts", 0))
        moe_layers = _moe_layers(config) if experts else 0
        return cls(
            num_dense_layers=layers - moe_layers,
            num_moe_layers=moe_layers,
            hidden_size=config["hidden_size"],
            query_size=heads * head_size,
            kv_size=config["num_key_value_heads"] * head_size,
            dense_ffn_size=config["intermediate_size"] if moe_layers < layers else 0,
            expert_ffn_size=config["moe_intermediate_size"] if moe_layers else 0,
            experts_per_token=config["num_experts_per_tok"] if moe_layers else 0,
            shared_ffn_size=config.get("shared_expert_intermediate_size", 0) if moe_layers else 0,
            vocab_size=config["vocab_size"],
        )


def shape_of(model: str, overrides: Mapping[str, Any] | None = None) -> DecoderShape | None:
    """Shape of a model folder, with the recipe's `hf_config_overrides`; None where this count does not apply.

    It applies to `qwen3` and `qwen3_moe`, the families that the trainer builds.
    """
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8")) | dict(overrides or {})
        return DecoderShape.from_hf(config) if config.get("model_type") in ("qwen3", "qwen3_moe") else None
    except (OSError, ValueError, KeyError):
        return None


def forward_flops(shape: DecoderShape, tokens: int, attended: float) -> float:
    """FLOPs of one forward pass.

    Args:
        tokens: tokens that pass through.
        attended: (query, key) pairs of one layer; half the sum of squared lengths for causal attention.
    """
    h, layers = shape.hidden_size, shape.num_dense_layers + shape.num_moe_layers
    attention = h * (shape.query_size + 2 * shape.kv_size) + shape.query_size * h
    active = shape.experts_per_token * shape.expert_ffn_size + shape.shared_ffn_size
    feed_forward = (
        _SWIGLU_MATRICES * h * (shape.num_dense_layers * shape.dense_ffn_size + shape.num_moe_layers * active)
    )
    per_token = layers * attention + feed_forward + h * shape.vocab_size
    # Scores and their product with the values: one multiply-add each for a pair and a query channel.
    pairs = layers * 2 * shape.query_size * attended
    return _MULTIPLY_ADD * (tokens * per_token + pairs)


def training_flops(shape: DecoderShape, lengths: Sequence[int]) -> float:
    """FLOPs of forward and backward over sequences of the given lengths (tokens, without padding), each on its own."""
    tokens = sum(int(length) for length in lengths)
    attended = sum(int(length) ** 2 for length in lengths) / 2
    return _FORWARD_AND_BACKWARD * forward_flops(shape, tokens, attended)


def training_flops_per_token(shape: DecoderShape, sequence_length: int) -> float:
    """Mean training FLOPs of a token in sequences of one length."""
    return training_flops(shape, [sequence_length]) / sequence_length


def _moe_layers(config: Mapping[str, Any]) -> int:
    return sum(has_experts(config, layer) for layer in range(config["num_hidden_layers"]))
