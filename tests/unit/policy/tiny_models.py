"""Tiny Qwen3 checkpoints for the tests of the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

_SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "attention_dropout": 0.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def make_model(kind: str, *, tied: bool = False, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A float32 model whose parameters are all distinctive: norms are not ones, routers are spread out.

    Args:
        kind: `dense` or `moe` (8 experts, top 2).
        tied: the head is the embedding.
        changes: keys of the config to replace.
    """
    torch.manual_seed(seed)
    settings = {**_SHAPE, "tie_word_embeddings": tied}
    if kind == "moe":
        model = Qwen3MoeForCausalLM._from_config(
            Qwen3MoeConfig(**{**settings, **_EXPERTS, **changes}), dtype=torch.float32
        )
    else:
        model = Qwen3ForCausalLM._from_config(Qwen3Config(**{**settings, **changes}), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.3 if name.endswith("gate.weight") else 0.08)
    return model.eval()


def save_model(folder: Path, kind: str, **settings: Any) -> PreTrainedModel:
    """`make_model`, written to the folder as a checkpoint without tokenizer."""
    model = make_model(kind, **settings)
    model.save_pretrained(folder)
    return model


def recipe_policy(folder: Path, **megatron: Any) -> dict[str, Any]:
    """The `policy` section of a float32 recipe.

    Args:
        megatron: keys of `megatron_cfg`.
    """
    return {
        "model_name": str(folder),
        "precision": "float32",
        "megatron_cfg": megatron,
        "generation": {"max_new_tokens": 32},
    }


def per_expert(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors under checkpoint names, from names of a model that stacks its experts in one tensor."""
    result: dict[str, torch.Tensor] = {}
    for name, tensor in named.items():
        stem, marker, kind = name.rpartition(".experts.")
        if not marker:
            result[name] = tensor
            continue
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
        for expert, weight in enumerate(tensor):
            for part, piece in zip(parts, weight.chunk(len(parts)), strict=True):
                result[f"{stem}.experts.{expert}.{part}.weight"] = piece
    return result
