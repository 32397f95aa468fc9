"""Keys of a point that follow from others, settled only where an axis of the sweep touches what they depend on."""

from __future__ import annotations

import math
from collections.abc import Callable

from nemo_rl_moe.bench.sweep.axes import Impossible, Plain
from nemo_rl_moe.recipe.hybrid_ep import (
    CHUNK_ENV,
    DEFAULT_CHUNK,
    DOMAIN_ENV,
    DOMAINS,
    MNNVL_ENV,
    RANKS_ENV,
    TOPOLOGY_ENV,
    expected_ranks,
)
from nemo_rl_moe.recipe.rules.divisors import near_divisors

_CONNECTIONS, _REGISTER = "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_GRAPH_REGISTER"
# With overlap two streams of kernels run side by side, as in the published runs.
_OVERLAPPED_CONNECTIONS = "32"
_DEFAULT_SMS = 32


def settle(plain: Plain, which: frozenset[str], num_layers: int | None) -> None:
    """Settles the named keys of a point.

    Args:
        num_layers: layers of the model; None where they are not known.

    Raises:
        Impossible: VPP that the layers of a stage cannot be cut into.
    """
    for name in which:
        _SETTLERS[name](plain, num_layers)
    plain.pop("vpp", None)


def _lengths(plain: Plain, num_layers: int | None) -> None:
    policy, megatron = plain["policy"], plain["policy"]["megatron_cfg"]
    tp, cp = megatron["tensor_model_parallel_size"], megatron["context_parallel_size"]
    megatron["sequence_parallel"] = tp > 1
    policy["make_sequence_length_divisible_by"] = math.lcm(tp * (2 * cp if cp > 1 else 1), 1)


def _chunks(plain: Plain, num_layers: int | None) -> None:
    """VPP as the layers of one chunk."""
    vpp, megatron = plain.get("vpp"), plain["policy"]["megatron_cfg"]
    if vpp is None or num_layers is None:
        return
    if vpp == 1:
        megatron["num_layers_per_virtual_pipeline_stage"] = None
        return
    pp = megatron["pipeline_model_parallel_size"]
    slots = num_layers + sum(megatron[f"account_for_{part}_in_pipeline_split"] for part in ("embedding", "loss"))
    if slots % pp:
        return  # A rule says so, with the sizes that divide.
    if slots // pp % vpp:
        raise Impossible(
            f"virtual pipeline: VPP {vpp} does not divide the {slots // pp} layers of a stage; "
            f"{near_divisors(slots // pp, vpp)} would"
        )
    megatron["num_layers_per_virtual_pipeline_stage"] = slots // pp // vpp


def _hybrid_ep(plain: Plain, num_layers: int | None) -> None:
    """The variables from which HybridEP learns the topology; without it they go, for they would be ignored."""
    megatron, cluster = plain["policy"]["megatron_cfg"], plain["cluster"]
    env = {name: value for name, value in (megatron["env_vars"] or {}).items() if name not in TOPOLOGY_ENV}
    if megatron["moe_flex_dispatcher_backend"] == "hybridep":
        domain = DOMAINS.get(cluster["gpu_type"])
        if domain is not None:
            ranks = expected_ranks(megatron["expert_model_parallel_size"], domain, cluster["gpus_per_node"])
            chunk = (megatron["env_vars"] or {}).get(CHUNK_ENV, str(DEFAULT_CHUNK))
            env |= {RANKS_ENV: str(ranks), MNNVL_ENV: str(int(domain.spans_nodes)), CHUNK_ENV: chunk}
            env[DOMAIN_ENV] = str(domain.gpus)
            if megatron["hybridep_num_ranks_per_nvlink_domain"] is not None:
                megatron["hybridep_num_ranks_per_nvlink_domain"] = ranks
        megatron["moe_hybridep_num_sms"] = megatron["moe_hybridep_num_sms"] or _DEFAULT_SMS
    else:
        megatron.update(
            hybridep_num_ranks_per_nvlink_domain=None,
            hybridep_use_mnnvl=None,
            moe_hybridep_prepad_packed_inputs=False,
            moe_hybridep_num_sms=None,
        )
    megatron["env_vars"] = env or None


def _connections(plain: Plain, num_layers: int | None) -> None:
    megatron = plain["policy"]["megatron_cfg"]
    env = dict(megatron["env_vars"] or {})
    if megatron["overlap_moe_expert_parallel_comm"]:
        env[_CONNECTIONS] = _OVERLAPPED_CONNECTIONS
    elif env.get(_CONNECTIONS) == _OVERLAPPED_CONNECTIONS:
        del env[_CONNECTIONS]
    megatron["env_vars"] = env or None


def _graphs(plain: Plain, num_layers: int | None) -> None:
    megatron = plain["policy"]["megatron_cfg"]
    env = dict(megatron["env_vars"] or {})
    if megatron["cuda_graph_impl"] == "transformer_engine":
        # Graphs and expandable segments need it.
        env[_REGISTER] = "0"
    megatron["env_vars"] = env or None


_SETTLERS: dict[str, Callable[[Plain, int | None], None]] = {
    "lengths": _lengths,
    "chunks": _chunks,
    "hybrid_ep": _hybrid_ep,
    "connections": _connections,
    "graphs": _graphs,
}
