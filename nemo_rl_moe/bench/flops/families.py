"""Multiply-adds of each model family in one forward pass, part by part, from a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_rl_moe.recipe.memory.parameters import has_experts, head_size
from nemo_rl_moe.recipe.published_models import expert_count

_SWIGLU_MATRICES = 3
_SQUARED_RELU_MATRICES = 2
# Operations of Mamba's scan for each token and state value, as Megatron-LM counts them (not multiply-adds).
_SCAN_OPERATIONS = 7


@dataclass
class Work:
    """Multiply-adds by term: [per token, per attended (query, key) pair]; and notes on the count."""

    terms: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, per_token: float, per_pair: float = 0.0) -> None:
        """Adds to a term."""
        sizes = self.terms.setdefault(name, [0.0, 0.0])
        sizes[0] += per_token
        sizes[1] += per_pair


def _grouped_attention(work: Work, config: Mapping[str, Any]) -> None:
    head, hidden = head_size(config), config["hidden_size"]
    query, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    work.add("attention projections", hidden * (query + 2 * keys) + query * hidden)
    # Scores, and their product with the values: one multiply-add each for a pair and a query channel.
    work.add("attention scores and values", 0.0, 2.0 * query)


def _latent_attention(work: Work, config: Mapping[str, Any]) -> None:
    """Multi-head latent attention (arXiv:2412.19437, section 2.1.1): queries and keys go through low-rank latents."""
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    queries = config.get("q_lora_rank")
    query = heads * (nope + rope)
    into_query = queries * (hidden + query) if queries else hidden * query
    into_keys = latent * (hidden + heads * (nope + value)) + hidden * rope
    work.add("attention projections", into_query + into_keys + heads * value * hidden)
    work.add("attention scores and values", 0.0, float(query + heads * value))


def _dense(work: Work, config: Mapping[str, Any]) -> None:
    work.add("dense layers", _SWIGLU_MATRICES * config["hidden_size"] * config["intermediate_size"])


def _experts(work: Work, config: Mapping[str, Any]) -> None:
    hidden, width = config["hidden_size"], config["moe_intermediate_size"]
    shared = config.get("shared_expert_intermediate_size", 0) or (config.get("n_shared_experts") or 0) * width
    work.add("routed experts", _SWIGLU_MATRICES * hidden * config["num_experts_per_tok"] * width)
    work.add("shared experts", _SWIGLU_MATRICES * hidden * shared)


def _output(work: Work, config: Mapping[str, Any], mtp_layers: int) -> None:
    work.add("output matrix", config["hidden_size"] * config["vocab_size"] * (1 + mtp_layers))


def _decoder(
    attention: Callable[[Work, Mapping[str, Any]], None], is_moe: Callable[[Mapping[str, Any], int], bool]
) -> Callable[[Mapping[str, Any], int], Work]:
    """A stack of attention and feed-forward layers; a multi-token-prediction layer is of the last layer's kind."""

    def count(config: Mapping[str, Any], mtp_layers: int) -> Work:
        work, layers = Work(), config["num_hidden_layers"]
        for index in [*range(layers), *[layers - 1] * mtp_layers]:
            attention(work, config)
            (_experts if is_moe(config, index) else _dense)(work, config)
        hidden = config["hidden_size"]
        # Two hidden states are joined and projected to one, after three norms, which this part of the count includes.
        work.add("multi-token projections", mtp_layers * (2 * hidden**2 + 3 * hidden))
        _output(work, config, mtp_layers)
        return work

    return count


def _qwen3_is_moe(config: Mapping[str, Any], index: int) -> bool:
    return expert_count(config) > 0 and has_experts(config, index)


def _nemotron(config: Mapping[str, Any], mtp_layers: int) -> Work:
    """One part for each layer: Mamba-2, attention, or experts, which may work in a latent of the residual stream."""
    work = Work()
    own = config["hybrid_override_pattern"]
    for kind in own + config.get("mtp_hybrid_override_pattern", "") * mtp_layers:
        _NEMOTRON_PARTS[kind](work, config)
    _output(work, config, mtp_layers)
    hidden, inner = config["hidden_size"], config["mamba_num_heads"] * config["mamba_head_dim"]
    if inner != 2 * hidden and "M" in own:
        text = f"Mamba's inner width is counted as 2 x hidden = {2 * hidden}, as published results do; it is {inner}"
        work.notes.append(text)
    return work


def _mamba(work: Work, config: Mapping[str, Any]) -> None:
    # Published results take twice the hidden size, whatever the model's heads are: see the note above.
    hidden, inner = config["hidden_size"], 2 * config["hidden_size"]
    state = config["n_groups"] * config["ssm_state_size"]
    work.add("Mamba projections", hidden * (2 * inner + 2 * state + config["mamba_num_heads"]) + inner * hidden)
    work.add("Mamba scan", _SCAN_OPERATIONS / 2 * inner * config["ssm_state_size"])


def _latent_experts(work: Work, config: Mapping[str, Any]) -> None:
    hidden, latent = config["hidden_size"], config.get("moe_latent_size")
    active = config["num_experts_per_tok"] * config["moe_intermediate_size"]
    work.add("routed experts", _SQUARED_RELU_MATRICES * (latent or hidden) * active)
    work.add("expert latent projections", 2 * hidden * (latent or 0))
    shared = config.get("moe_shared_expert_intermediate_size", 0)
    work.add("shared experts", _SQUARED_RELU_MATRICES * hidden * shared)


def _plain(work: Work, config: Mapping[str, Any]) -> None:
    work.add("dense layers", _SQUARED_RELU_MATRICES * config["hidden_size"] * config["intermediate_size"])


_NEMOTRON_PARTS = {"M": _mamba, "*": _grouped_attention, "E": _latent_experts, "-": _plain}

TERMS: dict[str, Callable[[Mapping[str, Any], int], Work]] = {
    "llama": _decoder(_grouped_attention, lambda config, index: False),
    "qwen3": _decoder(_grouped_attention, lambda config, index: False),
    "qwen3_moe": _decoder(_grouped_attention, _qwen3_is_moe),
    "deepseek_v3": _decoder(_latent_attention, lambda config, index: index >= config["first_k_dense_replace"]),
    "nemotron_h": _nemotron,
}
