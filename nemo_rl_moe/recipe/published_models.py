"""config.json of the models in the shipped cluster recipes and in published throughput results.

The keys are those that rules, parameter counts, memory and FLOP counts need.

So that a recipe of a 671B model can be checked and planned on a laptop that has no copy of it. Values are those of the
models' Hugging Face repositories. Nemotron 3 Super's are the ones that independent implementations of it agree on; they
give 120.7 billion parameters, as published; Nano's give 31.6 billion.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_rl_moe.recipe.schema import PolicyConfig

_QWEN3 = {"head_dim": 128, "max_position_embeddings": 40960, "vocab_size": 151936, "tie_word_embeddings": False}
_NEMOTRON3 = {
    "model_type": "nemotron_h",
    "num_key_value_heads": 2,
    "num_attention_heads": 32,
    "head_dim": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "max_position_embeddings": 262144,
    "vocab_size": 131072,
    "tie_word_embeddings": False,
}
_QWEN3_MOE = _QWEN3 | {
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-30B-A3B": _QWEN3_MOE
    | {
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
    },
    "Qwen/Qwen3-235B-A22B": _QWEN3_MOE
    | {
        "num_hidden_layers": 94,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
    },
    "Qwen/Qwen3-32B": _QWEN3
    | {
        "model_type": "qwen3",
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 25600,
    },
    "deepseek-ai/DeepSeek-V3": {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 163840,
        "vocab_size": 129280,
        "tie_word_embeddings": False,
    },
    "meta-llama/Llama-3.1-8B-Instruct": {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    # M is a Mamba-2 layer, E a mixture of experts, * attention.
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": _NEMOTRON3
    | {
        "num_hidden_layers": 52,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "hidden_size": 2688,
        "mamba_num_heads": 64,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
    },
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": _NEMOTRON3
    | {
        "num_hidden_layers": 88,
        "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*"
        "EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
        "hidden_size": 4096,
        "mamba_num_heads": 128,
        "n_routed_experts": 512,
        "num_experts_per_tok": 22,
        "moe_intermediate_size": 2688,
        "moe_shared_expert_intermediate_size": 5376,
        "moe_latent_size": 1024,
        "num_nextn_predict_layers": 1,
        "mtp_hybrid_override_pattern": "*E",
    },
}


# The families write the number of routed experts under different names.
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


def expert_count(config: Mapping[str, Any]) -> int:
    """Routed experts of a layer; 0 in a dense model."""
    return next((config[key] for key in _EXPERT_KEYS if config.get(key) is not None), 0)


def model_config(policy: PolicyConfig) -> dict[str, Any] | None:
    """config.json of the recipe's model, `hf_config_overrides` applied; None when it is not known on this machine.

    A broken model folder gives None too: the loaders of tokenizer and model report it, with more to say about it.
    """
    path = Path(policy.model_name) / "config.json"
    if not path.is_file():
        known = PUBLISHED.get(policy.model_name)
        return None if known is None else known | policy.hf_config_overrides
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values | policy.hf_config_overrides if isinstance(values, dict) else None
