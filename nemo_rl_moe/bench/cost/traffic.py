"""Traffic of the experts' dispatch and combine, and the time that the links need for it at their line rate.

A lower bound: no latency, no protocol, every card busy all the time, tokens spread evenly over the experts. It says
what a layout costs on a machine before anything is hidden behind computation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nemo_rl_moe.bench.cost.job import Job

_WIRE_BYTES = 2  # bfloat16: megatron-core dispatches nothing narrower over these back ends.
# Dispatch and combine, forward and backward.
_PASSES = 4


@dataclass(frozen=True)
class Traffic:
    """Experts' traffic of one GPU.

    Args:
        islands: NVLink domains that an expert-parallel group spans.
        remote_copies: copies of a token that leave its domain, on average.
        transfer_bytes: bytes that leave the domain in one dispatch or combine of a micro-batch.
        transfers: such transfers in a step, of the fullest pipeline stage.
        network_seconds: of a step, at the line rate of the GPU's network cards.
        nvlink_seconds: of a step, for the copies inside the domain.
    """

    islands: int
    remote_copies: float
    transfer_bytes: float
    transfers: int
    network_seconds: float
    nvlink_seconds: float


def distinct_places(experts: int, chosen: int, places: int) -> float:
    """Places that a token's experts are in, on average, when `chosen` of `experts` are drawn evenly.

    Each place holds experts / places. A place is missed with probability C(E - E/p, k) / C(E, k).
    """
    held = experts // places
    return places * (1 - math.comb(experts - held, chosen) / math.comb(experts, chosen))


def expert_traffic(job: Job) -> Traffic:
    """Traffic of a job. DeepEP and HybridEP send a token to each domain once; the others once for each expert."""
    experts, chosen = job.model.experts, job.model.experts_per_token
    layers = job.stage_moe_layers if experts else 0
    group = job.ep * job.etp
    islands = -(-group // job.system.nvlink_domain)
    passes = _PASSES + (2 if job.recompute & {"full", "moe"} else 0)
    transfers = passes * layers * job.micro_batches
    if group == 1 or not layers:
        return Traffic(1, 0.0, 0.0, transfers, 0.0, 0.0)
    if job.dispatcher in ("deepep", "hybridep"):
        remote = distinct_places(experts, chosen, islands) * (islands - 1) / islands
        everywhere = distinct_places(experts, chosen, job.ep)
        # One copy for each rank with a chosen expert, but for the own; what came over the network is among them.
        local = max(everywhere * (job.ep - 1) / job.ep - remote, 0.0)
    else:
        remote = chosen * (islands - 1) / islands
        local = chosen * (job.ep - 1) / job.ep - remote
    bytes_each = job.rank_tokens * job.model.expert_width * _WIRE_BYTES
    return Traffic(
        islands=islands,
        remote_copies=remote,
        transfer_bytes=remote * bytes_each,
        transfers=transfers,
        network_seconds=remote * bytes_each * transfers / (job.system.network_gbit * 1e9 / 8),
        nvlink_seconds=local * bytes_each * transfers / (job.system.nvlink_gbyte * 1e9),
    )
