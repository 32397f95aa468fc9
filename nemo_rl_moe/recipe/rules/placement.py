"""Rules on nodes and devices."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_rl_moe.recipe.placement import engine_size, split_devices
from nemo_rl_moe.recipe.rules.registry import Context, Finding, rule

COLOCATED = "policy.generation.colocated"
RESOURCES = f"{COLOCATED}.resources"
VLLM_TP, VLLM_EP = "policy.generation.vllm_cfg.tensor_parallel_size", "policy.generation.vllm_cfg.expert_parallel_size"


@rule("generation devices", "A split run gives the generator devices of its own and leaves the trainer some.")
def split_is_possible(context: Context) -> Iterator[Finding]:
    cluster, colocated = context.recipe.cluster, context.recipe.policy.generation.colocated
    own = colocated.resources
    if colocated.enabled:
        return
    if cluster.num_nodes == 1:
        if own.num_nodes is not None and own.num_nodes > 1:
            yield Finding(
                (f"{RESOURCES}.num_nodes", "cluster.num_nodes"), f"{own.num_nodes} of 1 node, expected 1 or null"
            )
        elif own.gpus_per_node is None or own.gpus_per_node >= cluster.gpus_per_node:
            message = f"expected 1 to {cluster.gpus_per_node - 1} of the node's {cluster.gpus_per_node} devices"
            yield Finding((f"{RESOURCES}.gpus_per_node", f"{COLOCATED}.enabled", "cluster.gpus_per_node"), message)
        return
    if own.num_nodes is None or own.num_nodes >= cluster.num_nodes:
        message = f"expected 1 to {cluster.num_nodes - 1} of {cluster.num_nodes} nodes"
        yield Finding((f"{RESOURCES}.num_nodes", f"{COLOCATED}.enabled", "cluster.num_nodes"), message)
    if own.gpus_per_node is not None and own.gpus_per_node > cluster.gpus_per_node:
        message = f"{own.gpus_per_node} devices on a node that has {cluster.gpus_per_node}"
        yield Finding((f"{RESOURCES}.gpus_per_node", "cluster.gpus_per_node"), message)


@rule("vLLM devices", "Engines of TP x PP devices must fill the generator's devices.")
def engines_fill_devices(context: Context) -> Iterator[Finding]:
    devices, size = len(split_devices(context.recipe).generation), engine_size(context.recipe)
    vllm = context.recipe.policy.generation.vllm_cfg
    if devices % size:
        message = (
            f"{devices} generation devices are not a multiple of the engine's {size} (TP {vllm.tensor_parallel_size}"
        )
        message += f" x PP {vllm.pipeline_parallel_size}, EP {vllm.expert_parallel_size})"
        yield Finding((VLLM_TP, "policy.generation.vllm_cfg.pipeline_parallel_size", VLLM_EP), message)


@rule("vLLM experts", "vLLM shards experts over all of an engine's ranks: its EP is 1 or a multiple of its TP.")
def engine_experts(context: Context) -> Iterator[Finding]:
    vllm = context.recipe.policy.generation.vllm_cfg
    ep, tp = vllm.expert_parallel_size, vllm.tensor_parallel_size
    if ep > 1 and ep % tp:
        yield Finding((VLLM_EP, VLLM_TP), f"EP {ep} is not a multiple of TP {tp}")
    elif ep > tp and vllm.async_engine:
        message = f"EP {ep} above TP {tp} runs vLLM's own data parallelism, which async_engine forbids"
        yield Finding((VLLM_EP, "policy.generation.vllm_cfg.async_engine"), message)


@rule(
    "async placement",
    "Generation ahead needs devices of its own, the async engine, and a correction for older weights.",
)
def async_is_complete(context: Context) -> Iterator[Finding]:
    recipe, generation = context.recipe, context.recipe.policy.generation
    ahead, key = recipe.grpo.async_grpo, "grpo.async_grpo.enabled"
    if not ahead.enabled:
        if generation.vllm_cfg.pipeline_parallel_size > 1 and not generation.vllm_cfg.async_engine:
            keys = ("policy.generation.vllm_cfg.pipeline_parallel_size", "policy.generation.vllm_cfg.async_engine")
            yield Finding(keys, "PP above 1 needs async_engine true")
        return
    if generation.colocated.enabled:
        yield Finding(
            (f"{COLOCATED}.enabled", key), "true with async_grpo, expected false: generation needs its own devices"
        )
    if not generation.vllm_cfg.async_engine:
        yield Finding(("policy.generation.vllm_cfg.async_engine", key), "false with async_grpo, expected true")
    if not recipe.loss_fn.use_importance_sampling_correction:
        message = "false with async_grpo, expected true: samples come from older weights"
        yield Finding(("loss_fn.use_importance_sampling_correction", key), message)
    if recipe.grpo.use_dynamic_sampling:
        message = "true with async_grpo, expected false: further prompts for a step would be drawn out of order"
        yield Finding(("grpo.use_dynamic_sampling", key), message)
    if ahead.max_trajectory_age_steps > 1 and not ahead.in_flight_weight_updates:
        message = (
            f"age {ahead.max_trajectory_age_steps} without in_flight_weight_updates: every update waits for the slowest"
        )
        keys = ("grpo.async_grpo.in_flight_weight_updates", "grpo.async_grpo.max_trajectory_age_steps")
        yield Finding(keys, message, "warning")


@rule("vLLM heads", "vLLM splits attention heads evenly over its TP; key/value heads are split or copied whole.")
def engine_heads(context: Context) -> Iterator[Finding]:
    tp, model = context.recipe.policy.generation.vllm_cfg.tensor_parallel_size, context.model
    if model is not None and model.num_heads % tp:
        yield Finding((VLLM_TP,), f"TP {tp} does not divide the model's {model.num_heads} attention heads")
    elif model is not None and model.num_kv_heads is not None and model.num_kv_heads % tp and tp % model.num_kv_heads:
        message = f"TP {tp} neither divides nor is a multiple of {model.num_kv_heads} key/value heads"
        yield Finding((VLLM_TP,), message)
