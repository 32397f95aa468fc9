"""Activations that one layer keeps for its backward pass, from the shapes of the tensors that autograd saves.

Fused attention (no scores are stored), SwiGLU with its input kept, and tokens spread evenly over the experts. Mamba and
latent attention count their projections only, so they are estimates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl_moe.recipe.memory.parameters import Layer, head_size
from nemo_rl_moe.recipe.schema import Recipe


@dataclass(frozen=True)
class Saved:
    """Bytes of one layer and micro-batch on one rank.

    Args:
        layer_input: what full recomputation keeps; it is part of `residual`.
        residual: inputs of the two residual additions; `norms`: outputs of the two norms.
        mixer: projections of attention or Mamba and their result, without `up_projection`, which MLA can recompute.
        dense: hidden values of the dense layer or the shared experts, their activation included.
        expert_input, expert_hidden, expert_activation: of the routed experts.
    """

    layer_input: float = 0
    residual: float = 0
    norms: float = 0
    mixer: float = 0
    up_projection: float = 0
    dense: float = 0
    expert_input: float = 0
    expert_hidden: float = 0
    expert_activation: float = 0

    @property
    def total(self) -> float:
        """All of them: what a layer keeps without recomputation."""
        experts = self.expert_input + self.expert_hidden + self.expert_activation
        return self.residual + self.norms + self.mixer + self.up_projection + self.dense + experts


def saved_activations(config: Mapping[str, Any], layer: Layer, recipe: Recipe, tokens: int) -> Saved:
    """What a layer saves without recomputation.

    Args:
        config: config.json of the model.
        tokens: tokens of the micro-batch's row, before CP and SP shard it.
    """
    megatron, itemsize = recipe.policy.megatron_cfg, 4 if recipe.policy.precision == "float32" else 2
    tp, etp = megatron.tensor_model_parallel_size, megatron.expert_tensor_parallel_size
    row = tokens / megatron.context_parallel_size
    shard = row / (tp if megatron.sequence_parallel else 1)
    stream = shard * config["hidden_size"] * itemsize
    parts = 2 if layer.kind != "none" and layer.ffn != "none" else 1
    mixer, up_projection = _mixer_widths(config, layer)
    # Dense matrices with a gate: two hidden values and their product for each unit of width.
    dense = layer.dense / config["hidden_size"] if layer.dense else 0
    routed = shard * config.get("num_experts_per_tok", 0) * etp if layer.ffn == "moe" else 0
    width, gates = config.get("moe_intermediate_size", 0) / etp, 1 if config["model_type"] == "nemotron_h" else 2
    return Saved(
        layer_input=stream,
        residual=parts * stream,
        norms=parts * stream,
        mixer=row * mixer / tp * itemsize,
        up_projection=row * up_projection / tp * itemsize,
        dense=row * dense / tp * itemsize,
        expert_input=routed * config.get("moe_latent_size", config["hidden_size"]) * itemsize,
        expert_hidden=routed * gates * width * itemsize,
        expert_activation=routed * width * itemsize,
    )


def _mixer_widths(config: Mapping[str, Any], layer: Layer) -> tuple[float, float]:
    """Values that the mixer saves for each token, and those of MLA's up projections."""
    if layer.kind == "none":
        return 0, 0
    if layer.kind == "mamba":
        inner = config["mamba_num_heads"] * config["mamba_head_dim"]
        state = config["n_groups"] * config["ssm_state_size"]
        # Input projection, result of the convolution, result of the scan, gated norm.
        return (2 * inner + 2 * state + config["mamba_num_heads"]) + (inner + 2 * state) + 2 * inner, 0
    heads = config["num_attention_heads"]
    if config.get("kv_lora_rank"):
        key, value = config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"]
        latents = config["q_lora_rank"] + config["kv_lora_rank"] + config["qk_rope_head_dim"]
        return 2 * latents + heads * value, heads * (2 * key + value)
    head = head_size(config)
    query, keys = heads * head, config["num_key_value_heads"] * head
    # Norms of queries and keys save their inputs besides the values that attention saves.
    normed = query + keys if config["model_type"].startswith("qwen3") else 0
    return query + 2 * keys + normed + query, 0


def kept_activations(saved: Saved, recipe: Recipe) -> float:
    """Bytes that stay from forward to backward under the recipe's recomputation."""
    megatron = recipe.policy.megatron_cfg
    if not megatron.activation_checkpointing:
        return saved.total
    if megatron.recompute_granularity == "full":
        return saved.layer_input
    modules = set(megatron.recompute_modules or ("core_attn",))
    dropped = {
        "layernorm": saved.norms,
        "moe_act": saved.expert_activation,
        "mla_up_proj": saved.up_projection,
        "mlp": saved.dense if not saved.expert_hidden else 0,
        "shared_experts": saved.dense if saved.expert_hidden else 0,
        "moe": saved.expert_input + saved.expert_hidden + saved.expert_activation,
    }
    # `moe` covers `moe_act`; fused attention stores no scores that core_attn could save.
    if "moe" in modules:
        modules.discard("moe_act")
    return saved.total - sum(size for name, size in dropped.items() if name in modules)
