"""Parameters of a model, layer by layer, by the way that parallelism splits them.

Counts are exact for Qwen3 (dense and mixture of experts), Llama and DeepSeek-V3 (without its multi-token-prediction
layer, which is not trained). Those of Nemotron 3 follow published sizes and the layout of its checkpoints, which
nothing here can load, so they are marked as an estimate.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from nemo_rl_moe.recipe.published_models import expert_count

_GATED = 3  # gate, up and down


@dataclass(frozen=True)
class Layer:
    """Parameters of one decoder layer, and the widths that its activations have.

    Args:
        mixer: in matrices of attention or Mamba, which tensor parallelism cuts.
        dense: in matrices of the feed-forward part that every token passes, cut likewise; shared experts are here.
        copied: on every tensor-parallel rank: norms, low-rank projections.
        router: of the router, copied too; not trained with freeze_moe_router.
        experts: in routed experts, which EP and ETP cut.
        kind: the part that mixes tokens: `attention`, `mamba` or `none`.
        ffn: `dense`, `moe` or `none`.
    """

    mixer: int
    dense: int
    copied: int
    router: int = 0
    experts: int = 0
    kind: str = "attention"
    ffn: str = "dense"

    @property
    def total(self) -> int:
        """All of them."""
        return self.mixer + self.dense + self.copied + self.router + self.experts


@dataclass(frozen=True)
class ModelParameters:
    """Parameters of a whole model.

    Args:
        layers: decoder layers in order.
        embedding, head: rows x width of each; a tied head is 0.
        vocab_size: rows before padding.
        hidden_size: width of the residual stream.
        exact: whether the count is that of the model's checkpoint, and not an estimate.
    """

    layers: tuple[Layer, ...]
    embedding: int
    head: int
    vocab_size: int
    hidden_size: int
    exact: bool

    @cached_property
    def total(self) -> int:
        """All parameters of the model, the final norm included."""
        return sum(layer.total for layer in self.layers) + self.embedding + self.head + self.hidden_size

    def kinds(self, chunks: Sequence[range]) -> list[tuple[Layer, int]]:
        """The different layers in ranges of layers, and how many of each there are."""
        counts = ((layer, sum(upto[c.stop] - upto[c.start] for c in chunks)) for layer, upto in self._counts)
        return [(layer, count) for layer, count in counts if count]

    @cached_property
    def _counts(self) -> list[tuple[Layer, list[int]]]:
        """Each different layer, with how many of it there are before each index: models have one to three kinds."""
        kinds = dict.fromkeys(self.layers)
        return [(kind, [0, *itertools.accumulate(layer == kind for layer in self.layers)]) for kind in kinds]


def model_parameters(config: Mapping[str, Any]) -> ModelParameters | None:
    """Parameters of a model with this config.json; None for a family that is not known here.

    Raises:
        KeyError: a size is missing.
    """
    family = _FAMILIES.get(config.get("model_type", ""))
    if family is None:
        return None
    vocabulary = config["vocab_size"] * config["hidden_size"]
    return ModelParameters(
        layers=tuple(family(config, index) for index in range(config["num_hidden_layers"])),
        embedding=vocabulary,
        head=0 if config.get("tie_word_embeddings", False) else vocabulary,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        exact=config["model_type"] != "nemotron_h",
    )


def head_size(config: Mapping[str, Any]) -> int:
    """Width of one attention head."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def has_experts(config: Mapping[str, Any], index: int) -> bool:
    """Whether a layer of a Qwen3-MoE model has experts: every `decoder_sparse_step`-th not in `mlp_only_layers`."""
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    return (index + 1) % step == 0 and index not in dense


def _grouped_attention(config: Mapping[str, Any]) -> int:
    """Query, key, value and output matrices of grouped-query attention."""
    head, hidden = head_size(config), config["hidden_size"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return hidden * (query + 2 * key) + query * hidden


def _llama(config: Mapping[str, Any], index: int) -> Layer:
    hidden = config["hidden_size"]
    dense = _GATED * hidden * config["intermediate_size"]
    return Layer(mixer=_grouped_attention(config), dense=dense, copied=2 * hidden)


def _qwen3(config: Mapping[str, Any], index: int) -> Layer:
    layer = _llama(config, index)
    # One norm for all query heads and one for all key heads.
    return replace(layer, copied=layer.copied + 2 * head_size(config))


def _qwen3_moe(config: Mapping[str, Any], index: int) -> Layer:
    if not has_experts(config, index):
        return _qwen3(config, index)
    hidden, experts = config["hidden_size"], expert_count(config)
    return Layer(
        mixer=_grouped_attention(config),
        dense=0,
        copied=2 * hidden + 2 * head_size(config),
        router=experts * hidden,
        experts=experts * _GATED * hidden * config["moe_intermediate_size"],
        ffn="moe",
    )


def _deepseek(config: Mapping[str, Any], index: int) -> Layer:
    """Multi-head latent attention (arXiv:2412.19437, section 2.1.1): queries and keys go through low-rank latents."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    query, latent = config["q_lora_rank"], config["kv_lora_rank"]
    mixer = query * heads * (nope + rope) + latent * heads * (nope + value) + heads * value * hidden
    copied = hidden * (query + latent + rope) + query + latent + 2 * hidden
    if index < config["first_k_dense_replace"]:
        return Layer(mixer=mixer, dense=_GATED * hidden * config["intermediate_size"], copied=copied)
    expert, count = _GATED * hidden * config["moe_intermediate_size"], expert_count(config)
    return Layer(
        mixer=mixer,
        dense=config["n_shared_experts"] * expert,
        copied=copied,
        # A bias for each expert balances the load.
        router=count * hidden + count,
        experts=count * expert,
        ffn="moe",
    )


def _nemotron(config: Mapping[str, Any], index: int) -> Layer:
    """One part for each layer: Mamba-2, attention, or experts that work in a latent of the residual stream."""
    kind, hidden = config["hybrid_override_pattern"][index], config["hidden_size"]
    if kind == "*":
        return Layer(mixer=_grouped_attention(config), dense=0, copied=hidden, ffn="none")
    if kind == "M":
        heads = config["mamba_num_heads"]
        inner, state = heads * config["mamba_head_dim"], config["n_groups"] * config["ssm_state_size"]
        projections = hidden * (2 * inner + 2 * state + heads) + inner * hidden
        # Convolution with its bias; A, D and the time step's bias of each head; the gated norm.
        small = (inner + 2 * state) * (config["conv_kernel"] + 1) + 3 * heads + inner
        return Layer(mixer=projections + small, dense=0, copied=hidden, kind="mamba", ffn="none")
    count, width = expert_count(config), config["moe_intermediate_size"]
    # Super's experts work in a latent of the residual stream, Nano's in the stream itself.
    latent = config.get("moe_latent_size") or 0
    return Layer(
        mixer=0,
        dense=2 * hidden * config["moe_shared_expert_intermediate_size"],
        copied=2 * hidden * latent + hidden,
        router=count * hidden + count,
        experts=count * 2 * (latent or hidden) * width,
        kind="none",
        ffn="moe",
    )


_FAMILIES = {
    "llama": _llama,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek,
    "nemotron_h": _nemotron,
}
