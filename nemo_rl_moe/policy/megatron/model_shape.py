"""What a Hugging Face config.json says about a model, as plain numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_moe.errors import UserError
from nemo_rl_moe.policy.megatron.hf_files import model_folder

KNOWN_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a Qwen3 model.

    Attributes:
        architecture: `qwen3` or `qwen3_moe`.
        num_layers: transformer layers.
        hidden_size: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: width of one head.
        ffn_size: width of the dense feed-forward layers.
        vocab_size: tokens.
        rms_norm_eps: added to the mean square.
        rope_theta: base of the rotary frequencies.
        max_position_embeddings: longest sequence that the model was made for.
        tie_word_embeddings: the head is the embedding.
        num_experts: experts of each MoE layer; 0 in a dense model.
        experts_per_token: top-k.
        moe_ffn_size: width of one expert.
        norm_topk_prob: the chosen experts' weights add up to 1.
        moe_layers: for each layer, whether it has experts.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    num_experts: int
    experts_per_token: int
    moe_ffn_size: int
    norm_topk_prob: bool
    moe_layers: tuple[bool, ...]


def read_hf_config(folder: str | Path, overrides: Mapping[str, Any] | None = None) -> ModelShape:
    """Reads a model's config.json.

    Args:
        folder: model folder or hub id.
        overrides: keys of config.json to replace first.

    Raises:
        UserError: no such model, a key missing or of the wrong type, or a feature that is not supported.
    """
    path = model_folder(folder) / "config.json"
    try:
        config = json.loads(path.read_text()) | dict(overrides or {})
    except FileNotFoundError:
        raise UserError(f"{path}: not found; expected a Hugging Face model folder") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    kind = config.get("model_type")
    if kind not in KNOWN_ARCHITECTURES:
        known = ", ".join(f"{k} ({v})" for k, v in KNOWN_ARCHITECTURES.items())
        raise UserError(f"{path}: model_type {kind!r} is not supported; known are {known}")
    _refuse_unsupported(path, config)
    if "num_local_experts" in config:
        # transformers 5 writes this name, earlier versions and the published Qwen3 models the other.
        config.setdefault("num_experts", config["num_local_experts"])
    read = _Reader(path, config)
    layers, heads = read.integer("num_hidden_layers"), read.integer("num_attention_heads")
    moe = kind == "qwen3_moe"
    shape = ModelShape(
        architecture=kind,
        num_layers=layers,
        hidden_size=read.integer("hidden_size"),
        num_heads=heads,
        num_kv_heads=read.integer("num_key_value_heads"),
        head_dim=read.integer("head_dim") if config.get("head_dim") else read.integer("hidden_size") // heads,
        ffn_size=read.integer("intermediate_size"),
        vocab_size=read.integer("vocab_size"),
        rms_norm_eps=read.number("rms_norm_eps"),
        rope_theta=_rope_theta(path, config),
        max_position_embeddings=read.integer("max_position_embeddings"),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        num_experts=read.integer("num_experts") if moe else 0,
        experts_per_token=read.integer("num_experts_per_tok") if moe else 0,
        moe_ffn_size=read.integer("moe_intermediate_size") if moe else 0,
        norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        moe_layers=_moe_layers(config, layers) if moe else (False,) * layers,
    )
    _check_consistent(path, shape)
    return shape


def _check_consistent(path: Path, shape: ModelShape) -> None:
    if shape.num_heads % shape.num_kv_heads:
        raise UserError(
            f"{path}: num_key_value_heads is {shape.num_kv_heads}, expected a divisor of num_attention_heads, "
            f"{shape.num_heads}"
        )
    if shape.experts_per_token > shape.num_experts:
        raise UserError(
            f"{path}: num_experts_per_tok is {shape.experts_per_token}, expected at most num_experts, "
            f"{shape.num_experts}"
        )
    if shape.experts_per_token == 1 and shape.norm_topk_prob:
        # The one expert's weight is then always 1: the router would get no gradient, and Megatron refuses it.
        raise UserError(f"{path}: norm_topk_prob with one expert a token is not supported; expected false")


class _Reader:
    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self._path, self._config = path, config

    def integer(self, key: str) -> int:
        value = self._config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{self._path}: {key} is {value!r}, expected a positive integer")
        return value

    def number(self, key: str) -> float:
        value = self._config.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise UserError(f"{self._path}: {key} is {value!r}, expected a positive number")
        return float(value)


def _moe_layers(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Layer i has experts when (i + 1) is a multiple of decoder_sparse_step and i is not in mlp_only_layers."""
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    return tuple(step > 0 and (i + 1) % step == 0 and i not in dense for i in range(layers))


def _rope_theta(path: Path, config: Mapping[str, Any]) -> float:
    """transformers 5 keeps it in rope_parameters, earlier ones beside rope_scaling."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UserError(f"{path}: rope_type {kind!r} is not supported; expected 'default'")
    return _Reader(path, {"rope_theta": rope.get("rope_theta", config.get("rope_theta"))}).number("rope_theta")


def _refuse_unsupported(path: Path, config: Mapping[str, Any]) -> None:
    """A feature that is skipped in silence gives a model that is a little wrong, which is worse than none."""
    for key, expected in (("hidden_act", "silu"), ("attention_bias", False), ("use_sliding_window", False)):
        if config.get(key, expected) != expected:
            raise UserError(f"{path}: {key} {config[key]!r} is not supported; expected {expected!r}")
    if config.get("quantization_config"):
        raise UserError(f"{path}: quantized checkpoints are not supported; expected float32, bfloat16 or float16")
