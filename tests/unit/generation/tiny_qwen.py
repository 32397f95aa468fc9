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

from nemo_rl_moe.generation.interface import Completions, SamplingSpec

EOS_ID = 2
_COMMON = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": 0,
    # Large enough that two seeds give clearly different distributions, so that stale weights cannot pass a test.
    "initializer_range": 0.25,
}


def make_model(kind: str, seed: int, tied: bool = False) -> PreTrainedModel:
    """A float32 Qwen3 model with random weights.

    Args:
        kind: `moe` (8 experts, top 2) or `dense`.
        seed: of the weights.
        tied: one matrix for embedding and head.
    """
    torch.manual_seed(seed)
    if kind == "moe":
        model: PreTrainedModel = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **_COMMON,
                tie_word_embeddings=tied,
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
        model = Qwen3ForCausalLM(Qwen3Config(**_COMMON, tie_word_embeddings=tied, intermediate_size=128))
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


def checkpoint_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's weights under the names of its checkpoint: one tensor for each expert's matrix."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        base, marker, kind = name.rpartition(".experts.")
        if not marker:
            tensors[name] = tensor
            continue
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
        for expert, weight in enumerate(tensor):
            for part, piece in zip(parts, weight.chunk(len(parts)), strict=True):
                tensors[f"{base}.experts.{expert}.{part}.weight"] = piece
    return tensors


def worst_logprob_error(
    model: PreTrainedModel, prompts: list[list[int]], completions: Completions, spec: SamplingSpec
) -> float:
    """Largest difference between the completions' log-probabilities and the model's, one sequence at a time."""
    worst, start = 0.0, 0
    temperature = spec.temperature or 1.0
    for row, length in enumerate(completions.lengths.tolist()):
        prompt = prompts[row // spec.n]
        response = torch.from_numpy(completions.token_ids[start : start + length]).long()
        tokens = torch.cat([torch.tensor(prompt), response])
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, len(prompt) - 1 : -1] / temperature
        expected = torch.log_softmax(logits, -1).gather(-1, response[:, None])[:, 0]
        found = torch.from_numpy(completions.logprobs[start : start + length])
        worst = max(worst, (expected - found).abs().max().item())
        start += length
    return worst


def random_prompts(count: int, seed: int, shortest: int = 8, longest: int = 120) -> list[list[int]]:
    """Prompts of random text bytes with random lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(4, 260, (n,), generator=generator).tolist() for n in lengths]
