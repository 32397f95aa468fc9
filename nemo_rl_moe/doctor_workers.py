"""The doctor's look into Ray workers: do they run what the driver runs?"""

from __future__ import annotations

import os
import socket

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_rl_moe.doctor import Check, compare_with_driver
from nemo_rl_moe.limits import DOCTOR_ANSWER_S, DOCTOR_CONNECT_S
from nemo_rl_moe.tracking.manifest import versions


def check_workers() -> list[Check]:
    """Versions on every living node of the Ray cluster against the driver's. Connects to the cluster that is up."""
    address = os.environ.get("RAY_ADDRESS", "")
    connected = ray.is_initialized()
    if not connected and (silence := _silence(address)):
        return [Check("workers", "Ray cluster", "wrong", silence, "an answer", "start Ray there, or unset RAY_ADDRESS")]
    try:
        if not connected:
            ray.init(address="auto", log_to_driver=False, logging_level="error")
        nodes = [node for node in ray.nodes() if node["Alive"]]
        return [check for node in nodes for check in _check_node(node["NodeID"], node["NodeManagerHostname"])]
    except ConnectionError:
        return [Check("workers", "Ray cluster", "ok", "none is up: a run starts its own, from this environment")]
    except RuntimeError as error:
        # Ray itself refuses a driver whose Python or Ray differs from the cluster's, and says both versions.
        return [Check("workers", "Ray cluster", "wrong", " ".join(str(error).split()), fix="use the same environment")]
    finally:
        if not connected and ray.is_initialized():
            ray.shutdown()


def _silence(address: str) -> str | None:
    """Why nothing answers at a `host:port`; Ray itself would try for minutes before it said so."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        return None
    try:
        socket.create_connection((host, int(port)), timeout=DOCTOR_CONNECT_S).close()
    except OSError as error:
        return f"RAY_ADDRESS={address}: {error.strerror or error}"
    return None


def _check_node(node_id: str, name: str) -> list[Check]:
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(num_cpus=0, scheduling_strategy=strategy)(versions)
    try:
        return compare_with_driver(versions(), name, ray.get(task.remote(), timeout=DOCTOR_ANSWER_S))
    except ray.exceptions.RayError as error:
        found = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return [Check("workers", name, "wrong", found, "an answer", f"is nemo_rl_moe installed on {name}?")]
