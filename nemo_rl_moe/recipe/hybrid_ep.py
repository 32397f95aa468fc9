"""HybridEP's topology: the one place that knows NVLink domains, ranks in them, and the variables that say so.

HybridEP moves tokens over NVLink inside a domain and over the network between domains. It learns the shape from
environment variables of the policy workers; the recipe has typed keys for two of them. Both are checked here against
the expert-parallel size and the GPU (limits: DeepEP, branch hybrid-ep).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from nemo_rl_moe.recipe.schema import Recipe
from nemo_rl_moe.recipe.schema.policy import MegatronConfig

RANKS_ENV = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"
MNNVL_ENV = "USE_MNNVL"
DOMAIN_ENV = "NVLINK_DOMAIN_SIZE"
CHUNK_ENV = "NUM_OF_TOKENS_PER_CHUNK_COMBINE_API"
TOPOLOGY_ENV = (RANKS_ENV, MNNVL_ENV, DOMAIN_ENV, CHUNK_ENV)

MAX_DOMAINS = 33
MAX_TOKENS_BETWEEN_DOMAINS = 21844
DEFAULT_CHUNK = 128
PREPAD_TOKENS = 128


@dataclass(frozen=True)
class NvlinkDomain:
    """GPUs that reach one another over NVLink, and how many of them a node holds."""

    gpus: int
    gpus_per_node: int

    @property
    def spans_nodes(self) -> bool:
        """Multi-node NVLink: the domain is a rack, not a node."""
        return self.gpus > self.gpus_per_node


DOMAINS = {
    "h100": NvlinkDomain(8, 8),
    "h200": NvlinkDomain(8, 8),
    "b200": NvlinkDomain(8, 8),
    "gb200": NvlinkDomain(72, 4),
    "gb300": NvlinkDomain(72, 4),
    "gh200": NvlinkDomain(4, 4),
}


def domain_of(recipe: Recipe) -> NvlinkDomain | None:
    """The NVLink domain of the recipe's GPU, None when cluster.gpu_type is not given."""
    return DOMAINS[recipe.cluster.gpu_type] if recipe.cluster.gpu_type else None


def uses_hybrid_ep(recipe: Recipe) -> bool:
    """Whether tokens reach their experts through HybridEP."""
    return backend_is_hybrid_ep(recipe.policy.megatron_cfg)


def backend_is_hybrid_ep(megatron: MegatronConfig) -> bool:
    """The same, from the trainer's settings alone."""
    return megatron.moe_token_dispatcher_type == "flex" and megatron.moe_flex_dispatcher_backend == "hybridep"


def prepad_multiple(megatron: MegatronConfig) -> int:
    """Prepadded rows are multiples of this, so that each rank's share under CP and SP is one of PREPAD_TOKENS."""
    cp, tp = megatron.context_parallel_size, megatron.tensor_model_parallel_size
    return PREPAD_TOKENS * (2 * cp if cp > 1 else 1) * (tp if megatron.sequence_parallel else 1)


def needs_prepadding(recipe: Recipe) -> bool:
    """Whether packed micro-batches have lengths that differ between EP ranks and nothing else makes them equal.

    HybridEP's collectives need one length on all ranks. With PP above 1 the schedule pads already; multi-token
    prediction reads the sequence's end and cannot be padded.
    """
    megatron = recipe.policy.megatron_cfg
    return (
        uses_hybrid_ep(recipe)
        and recipe.policy.sequence_packing.enabled
        and megatron.pipeline_model_parallel_size == 1
        and megatron.mtp_num_layers == 0
    )


def expected_ranks(ep: int, domain: NvlinkDomain, gpus_per_node: int) -> int:
    """Ranks of one EP group that share an NVLink domain.

    In a rack that is the whole group. Elsewhere the domain is the node, and every node holds equally many of the group:
    4 of EP 6 do not divide it, so that a node of 4 GPUs holds 2.
    """
    return ep if domain.spans_nodes else math.gcd(ep, min(domain.gpus, gpus_per_node))


def expected_environment(recipe: Recipe) -> dict[str, str]:
    """The variables that describe the recipe's GPU and EP size; empty without HybridEP or without a GPU type."""
    domain, ep = domain_of(recipe), recipe.policy.megatron_cfg.expert_model_parallel_size
    if domain is None or not uses_hybrid_ep(recipe):
        return {}
    return {
        RANKS_ENV: str(expected_ranks(ep, domain, recipe.cluster.gpus_per_node)),
        MNNVL_ENV: "1" if domain.spans_nodes else "0",
        DOMAIN_ENV: str(domain.gpus),
        CHUNK_ENV: str(DEFAULT_CHUNK),
    }


@dataclass(frozen=True)
class TopologyValue:
    """One variable as the policy workers see it, and where the value comes from."""

    name: str
    value: str
    source: str


def topology(recipe: Recipe, environment: Mapping[str, str]) -> tuple[TopologyValue, ...]:
    """The variables that HybridEP reads, each from the first that has it; none without HybridEP.

    The recipe's typed keys come first, then its env_vars, the process's own environment, what the GPU type implies, and
    for the chunk DeepEP's default.

    Args:
        environment: of the policy worker's process.
    """
    if not uses_hybrid_ep(recipe):
        return ()
    megatron = recipe.policy.megatron_cfg
    ranks, mnnvl = megatron.hybridep_num_ranks_per_nvlink_domain, megatron.hybridep_use_mnnvl
    typed = {
        RANKS_ENV: None if ranks is None else str(ranks),
        MNNVL_ENV: None if mnnvl is None else str(int(mnnvl)),
    }
    places: tuple[tuple[str, Mapping[str, str | None]], ...] = (
        ("megatron_cfg", typed),
        ("env_vars", dict(megatron.env_vars or {})),
        ("environment", dict(environment)),
        (f"gpu_type {recipe.cluster.gpu_type}", dict(expected_environment(recipe))),
        ("default", {CHUNK_ENV: str(DEFAULT_CHUNK)}),
    )
    found = []
    for name in TOPOLOGY_ENV:
        for source, values in places:
            value = values.get(name)
            if value is not None:
                found.append(TopologyValue(name, value, source))
                break
    return tuple(found)


def topology_line(recipe: Recipe, values: tuple[TopologyValue, ...]) -> str:
    """One line for the log."""
    megatron = recipe.policy.megatron_cfg
    sms = "the library's default" if megatron.moe_hybridep_num_sms is None else str(megatron.moe_hybridep_num_sms)
    settings = ", ".join(f"{v.name}={v.value} ({v.source})" for v in values)
    prepadded = "on" if megatron.moe_hybridep_prepad_packed_inputs else "off"
    return f"HybridEP topology: EP {megatron.expert_model_parallel_size}, SMs {sms}, prepadding {prepadded}, {settings}"


def tokens_per_rank(recipe: Recipe) -> int:
    """Tokens that one rank dispatches at most in one micro-batch: its share of the row under CP and SP."""
    policy, megatron = recipe.policy, recipe.policy.megatron_cfg
    packing = policy.sequence_packing
    budgets = [policy.max_total_sequence_length * policy.train_micro_batch_size]
    if packing.enabled:
        budgets = [
            packing.train_mb_tokens or policy.max_total_sequence_length * policy.train_micro_batch_size,
            packing.logprob_mb_tokens or policy.max_total_sequence_length * policy.logprob_batch_size,
        ]
    shards = megatron.context_parallel_size * (megatron.tensor_model_parallel_size if megatron.sequence_parallel else 1)
    return -(-max(budgets) // shards)
