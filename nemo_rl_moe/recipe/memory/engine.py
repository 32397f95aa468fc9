"""Bytes of one vLLM engine on each of its devices: weights, working memory, and the key/value cache that is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl_moe.recipe.memory.gpus import GIB
from nemo_rl_moe.recipe.memory.parameters import Layer, ModelParameters, head_size
from nemo_rl_moe.recipe.schema import Recipe

# vLLM measures activations and graphs of its largest batch when it starts; this stands for them. Not measured here.
WORKING_BYTES = 3 * GIB
CPU_DEFAULT_CACHE = 256 * 2**20


@dataclass(frozen=True)
class EngineMemory:
    """One device of an engine.

    Args:
        weights, working, cache: bytes; the cache is negative where the weights leave no room for one.
        cache_tokens: tokens that the whole engine can cache.
        budget: bytes that the engine may take, None where the GPU's size is not known.
    """

    weights: int
    working: int
    cache: int
    cache_tokens: int
    budget: int | None


def engine_memory(
    config: Mapping[str, Any], parameters: ModelParameters, recipe: Recipe, capacity: int | None
) -> EngineMemory | None:
    """Memory of an engine's device; None when neither the GPU's size nor the cache's is known.

    Args:
        capacity: bytes of the GPU; None on a CPU, or unknown.
    """
    vllm = recipe.policy.generation.vllm_cfg
    weights, on_cpu = engine_weights(parameters, recipe), recipe.cluster.device == "cpu"
    working = 0 if on_cpu else WORKING_BYTES
    budget = None if capacity is None else int(capacity * vllm.gpu_memory_utilization)
    if vllm.kv_cache_memory_bytes is not None:
        cache = vllm.kv_cache_memory_bytes
    elif on_cpu:
        cache = CPU_DEFAULT_CACHE
    elif budget is None:
        return None
    else:
        cache = budget - weights - working
    each = cache_bytes_per_token(config, parameters, recipe)
    return EngineMemory(weights, working, cache, max(int(cache // each), 0) if each else 0, budget)


def engine_weights(parameters: ModelParameters, recipe: Recipe) -> int:
    """Weights on one device. An engine with EP above TP copies what is not an expert over the extra devices."""
    vllm = recipe.policy.generation.vllm_cfg
    tp, pp = vllm.tensor_parallel_size, vllm.pipeline_parallel_size
    wide = max(tp, vllm.expert_parallel_size)
    itemsize = 4 if _engine_precision(recipe) == "float32" else 2
    last = len(parameters.layers) - vllm.num_last_layers_in_bf16
    total = 0.0
    for index, layer in enumerate(parameters.layers):
        quantised = vllm.num_first_layers_in_bf16 <= index < last
        mixer, other = _weight_sizes(recipe, itemsize) if quantised else (itemsize, itemsize)
        total += layer.mixer * mixer / tp + layer.dense * other / tp + layer.experts * other / wide
        total += (layer.copied + layer.router) * itemsize
    # Embedding and head are on the first and the last of the engine's stages.
    vocabulary = max(parameters.embedding, parameters.head) if pp > 1 else parameters.embedding + parameters.head
    return int(total / pp + vocabulary * itemsize / tp)


def _engine_precision(recipe: Recipe) -> str:
    precision = recipe.policy.generation.vllm_cfg.precision
    return recipe.policy.precision if precision == "auto" else precision


def _weight_sizes(recipe: Recipe, itemsize: int) -> tuple[float, float]:
    """Bytes of one weight of attention, and of the feed-forward part."""
    vllm = recipe.policy.generation.vllm_cfg
    if vllm.precision != "fp8":
        return itemsize, itemsize
    # One byte, and a scale: one byte for 32 values (MXFP8), or float32 for a block of 128 x 128.
    quantised = 1 + (1 / 32 if vllm.is_mx else 4 / 128**2)
    patterns = vllm.quantization_ignore_patterns or ()
    attention_stays = any("proj" in pattern or "attn" in pattern or "mixer" in pattern for pattern in patterns)
    return 2 if attention_stays else quantised, quantised


def cache_bytes_per_token(config: Mapping[str, Any], parameters: ModelParameters, recipe: Recipe) -> float:
    """Key/value cache of one token on one device, over this device's layers. Mamba's state has a fixed size."""
    vllm = recipe.policy.generation.vllm_cfg
    layers = sum(_caches(layer) for layer in parameters.layers) / vllm.pipeline_parallel_size
    itemsize = 1 if vllm.kv_cache_dtype == "fp8" else 4 if _engine_precision(recipe) == "float32" else 2
    if config.get("kv_lora_rank"):
        # The latent and the rotary key are one for all heads, so every device holds them.
        return layers * (config["kv_lora_rank"] + config["qk_rope_head_dim"]) * itemsize
    heads = max(config["num_key_value_heads"] / vllm.tensor_parallel_size, 1)
    return layers * 2 * heads * head_size(config) * itemsize


def _caches(layer: Layer) -> bool:
    return layer.kind == "attention"
