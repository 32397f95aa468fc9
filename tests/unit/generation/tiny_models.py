"""Tiny Qwen3 models with a byte-level tokenizer, made on the spot."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

EOS_ID = 2
_COMMON = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": 0,
    # Large enough that two seeds give clearly different distributions, so that stale weights cannot pass a test.
    "initializer_range": 0.25,
}


def make_model(kind: str, seed: int) -> PreTrainedModel:
    """A float32 Qwen3 model with random weights.

    Args:
        kind: `moe` (8 experts, top 2) or `dense`.
        seed: of the weights.
    """
    torch.manual_seed(seed)
    if kind == "moe":
        model: PreTrainedModel = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **_COMMON,
                intermediate_size=128,
                moe_intermediate_size=64,
                num_experts=8,
                num_experts_per_tok=2,
                norm_topk_prob=True,
                decoder_sparse_step=1,
                mlp_only_layers=[],
            )
        )
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**_COMMON, intermediate_size=128))
    with torch.no_grad():
        for parameter in model.parameters():
            # Norm weights are all ones after initialisation; then a test could not see one that was not refitted.
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.float().eval()


def save_model(model: PreTrainedModel, folder: Path) -> Path:
    """Writes checkpoint and tokenizer."""
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|eos|>"]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(special + alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>").save_pretrained(
        folder
    )
    return folder


def tiny_recipe(folder: Path, **generation: object) -> dict:
    """A CPU recipe as plain data, float32, 256 tokens in all, 64 MiB of key/value cache."""
    return {
        "policy": {
            "model_name": str(folder),
            "precision": "float32",
            "max_total_sequence_length": 256,
            "generation": {"max_new_tokens": 32, "vllm_cfg": {"kv_cache_memory_bytes": 64 << 20}, **generation},
        },
        "data": {"train": {"dataset_name": "jsonl", "path": "unused.jsonl"}},
        "env": {"math": {"verifier": "math_verify"}},
        "cluster": {"device": "cpu", "gpus_per_node": 1},
    }
