"""Which devices train and which generate: arithmetic shared by the rules and the plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from nemo_rl_moe.recipe.schema import Recipe


@dataclass(frozen=True)
class DeviceSplit:
    """Devices of both sides, numbered over all nodes in node order. Colocated sides hold the same ones."""

    policy: tuple[int, ...]
    generation: tuple[int, ...]
    policy_nodes: int
    generation_nodes: int


@lru_cache(maxsize=64)
def _devices(count: int) -> tuple[int, ...]:
    return tuple(range(count))


def split_devices(recipe: Recipe) -> DeviceSplit:
    """Devices of trainer and generator.

    Colocated: both take all. Split over nodes: the generator takes the last `resources.num_nodes` nodes. Split within
    nodes (`num_nodes` null): the generator takes the last `resources.gpus_per_node` devices of the only node. A recipe
    for the policy alone has no generator.
    """
    cluster, colocated = recipe.cluster, recipe.policy.generation.colocated
    per_node, nodes = cluster.gpus_per_node, cluster.num_nodes
    every = _devices(nodes * per_node)
    if recipe.benchmark.policy_only:
        return DeviceSplit(every, (), nodes, 0)
    if colocated.enabled:
        return DeviceSplit(every, every, nodes, nodes)
    wanted = colocated.resources
    if wanted.num_nodes is None or nodes == 1:
        own = wanted.gpus_per_node or 0
        return DeviceSplit(every[: len(every) - own], every[len(every) - own :] if own else (), nodes, nodes)
    first = (nodes - wanted.num_nodes) * per_node
    own = wanted.gpus_per_node or per_node
    generation = tuple(device for device in every[max(first, 0) :] if device % per_node < own)
    return DeviceSplit(every[: max(first, 0)], generation, nodes - wanted.num_nodes, wanted.num_nodes)


def model_parallel_size(recipe: Recipe) -> int:
    """Ranks of one copy of the policy: TP x PP x CP."""
    megatron = recipe.policy.megatron_cfg
    return megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size * megatron.context_parallel_size


def engine_size(recipe: Recipe) -> int:
    """Devices of one vLLM engine. EP above TP spreads it over EP devices, data-parallel outside the experts."""
    vllm = recipe.policy.generation.vllm_cfg
    return vllm.pipeline_parallel_size * max(vllm.tensor_parallel_size, vllm.expert_parallel_size)
