"""Workloads with times that are known by hand."""

from __future__ import annotations

from typing import Any

from nemo_rl_moe.bench.placement.simulate import Batch
from nemo_rl_moe.bench.placement.workload import Workload

# Two groups of four responses on four devices of engines of one, no limit in the way.
BATCH = Batch(2, 4, devices=4, engine_size=1, max_age=1, in_flight_updates=True, response_limit=10_000.0)


def workload(**changes: Any) -> Workload:
    """100 response tokens and no prompt; a step of 800 tokens trains for 800 / (devices x 10) seconds.

    A generation device gives 20 tokens a second, however many requests it has.
    """
    data: dict[str, Any] = {
        "response_tokens": {"distribution": "constant", "tokens": 100.0},
        "generation": {"decode_latency_s": 0.0, "peak_tokens_per_second": 20.0},
        "training": [{"devices": 4, "tokens_per_second_per_device": 10.0}],
        "refit": {"colocated_s": 3.0, "split_s": 1.0},
    }
    return Workload.model_validate(data | changes)
