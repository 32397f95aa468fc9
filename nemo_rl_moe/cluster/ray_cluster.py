"""Ray itself: connect or start, check that the recipe's resources are there, reserve them."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import ray
from ray._private import utils as ray_utils
from ray._private import worker as ray_worker
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from nemo_rl_moe import interrupts
from nemo_rl_moe.errors import PhaseTimeout, UserError
from nemo_rl_moe.limits import RAY_PROBE_S
from nemo_rl_moe.recipe.schema import ClusterConfig

_CPU_OBJECT_STORE_BYTES = 512 << 20


@contextlib.contextmanager
def ray_session(cluster: ClusterConfig) -> Iterator[None]:
    """Connects to the Ray cluster that is up, else starts one on this host and stops it at the end.

    That is the one of RAY_ADDRESS (`local` asks for a new one), else the one of the newest `ray start` on this host.

    Raises:
        UserError: RAY_ADDRESS, or the cluster that `ray start` left, cannot be connected to.
    """
    with _raylet_errors_untold():
        if ray.is_initialized():
            yield
        else:
            with _own_session(cluster):
                yield


@contextlib.contextmanager
def _raylet_errors_untold() -> Iterator[None]:
    """Keeps Ray's paragraph about each worker that dies off the run's output: the run says in a line what it does."""
    before, ray_worker._worker_logs_enabled = ray_worker._worker_logs_enabled, False
    try:
        yield
    finally:
        ray_worker._worker_logs_enabled = before


@contextlib.contextmanager
def _own_session(cluster: ClusterConfig) -> Iterator[None]:
    # Ray would otherwise clear CUDA_VISIBLE_DEVICES of CPU actors in its own way, with a warning for each.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray starts workers at niceness 15: whatever else runs on the host would stop a thread in the middle of an
    # operation, and the others wait for it.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # When a rank fails, its peers mostly fail with it. The run tells the first error; Ray would print the others.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    options: dict = {"log_to_driver": False, "logging_level": "warning"}
    address = os.environ.get("RAY_ADDRESS") or _started_cluster()
    if address in (None, "local"):
        # Without an address Ray would also try the record of a cluster that is gone.
        options |= {"address": "local", "include_dashboard": False}
        if cluster.device == "cpu":
            options["object_store_memory"] = _CPU_OBJECT_STORE_BYTES
        if cluster.oversubscribe_cpus:
            needed = cluster.num_nodes * cluster.gpus_per_node * cluster.cpus_per_device
            options["num_cpus"] = max(needed, ray_utils.get_num_cpus())
    # Ray tells at each start that its cluster asks for a token, which is what we want.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    try:
        # A Ray that is stopped while it starts leaves its agents behind.
        with interrupts.held(), _signals_kept_apart():
            _connect(address, options)
        yield
    finally:
        ray.shutdown()


def _connect(address: str | None, options: dict) -> None:
    try:
        ray.init(**options)
    except ConnectionError as error:
        raise UserError(
            f"Ray at {address}: {error}; correct RAY_ADDRESS, or set RAY_ADDRESS=local to start one for this run"
        ) from error


@contextlib.contextmanager
def _signals_kept_apart() -> Iterator[None]:
    """Leaves signals to the driver while Ray starts in the block.

    Ray would replace the driver's SIGTERM handler by one that exits with 15, and its processes would be in the driver's
    process group: a terminal that closes, or a scheduler that signals the group, would end them under a driver that
    still needs them for its clean-up. In sessions of their own they end with the driver, as Ray has it, or before.
    """
    keep_handler, die_with_parent = ray_utils.set_sigterm_handler, ray_utils.set_kill_on_parent_death_linux
    handler = signal.getsignal(signal.SIGTERM)

    def in_own_session() -> None:
        os.setsid()
        die_with_parent()

    ray_utils.set_sigterm_handler = lambda _: None
    ray_utils.set_kill_on_parent_death_linux = in_own_session
    try:
        yield
    finally:
        ray_utils.set_sigterm_handler, ray_utils.set_kill_on_parent_death_linux = keep_handler, die_with_parent
        if threading.current_thread() is threading.main_thread():
            # Ray's core has put one of its own in front of it, which prints a stack trace.
            signal.signal(signal.SIGTERM, handler)


def _started_cluster() -> str | None:
    """Address of the Ray that the newest `ray start` on this host left in its record; None when it is gone."""
    address = ray_utils.read_ray_address()
    if not address:
        return None
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=RAY_PROBE_S).close()
    except (OSError, ValueError):
        return None
    return address


def check_resources(cluster: ClusterConfig) -> None:
    """Compares what the recipe needs with what the Ray cluster has in all.

    Raises:
        UserError: within a second, with needed and found, instead of waiting for what will never come.
    """
    kind, per_device = ("GPU", 1) if cluster.device == "cuda" else ("CPU", cluster.cpus_per_device)
    per_node = cluster.gpus_per_node * per_device
    nodes = [n["Resources"].get(kind, 0) for n in ray.nodes() if n["Alive"]]
    fitting = sum(1 for amount in nodes if amount >= per_node)
    if fitting >= cluster.num_nodes:
        return
    found = ", ".join(f"{amount:g}" for amount in nodes)
    hint = ""
    if kind == "GPU" and not any(nodes):
        hint = " (cluster.device=cpu runs the same recipe on CPU cores)"
    elif kind == "CPU" and cluster.num_nodes == 1 and not cluster.oversubscribe_cpus:
        hint = " (cluster.oversubscribe_cpus=true lets devices share cores)"
    raise UserError(
        f"cluster: needs {cluster.num_nodes} node(s) with {per_node} {kind} each, "
        f"{cluster.num_nodes * per_node} in all; found {len(nodes)} node(s) with {found or 'none'} {kind}, "
        f"{sum(nodes):g} in all{hint}"
    )


@contextlib.contextmanager
def reserve_devices(cluster: ClusterConfig) -> Iterator[PlacementGroup]:
    """Reserves one bundle for each device, in node order, and gives them back at the end.

    Raises:
        UserError: the cluster can never hold them.
        PhaseTimeout: they are there but taken for longer than `cluster.placement_timeout_s`.
    """
    check_resources(cluster)
    device = {"GPU": 1.0, "CPU": 1.0} if cluster.device == "cuda" else {"CPU": float(cluster.cpus_per_device)}
    count = cluster.num_nodes * cluster.gpus_per_node
    group = placement_group([device] * count, strategy="STRICT_PACK" if cluster.num_nodes == 1 else "PACK")
    try:
        started = time.monotonic()
        ready, _ = ray.wait([group.ready()], timeout=cluster.placement_timeout_s)
        if not ready:
            free = ray.available_resources()
            waited = time.monotonic() - started
            raise PhaseTimeout(
                f"placement of {count} x {device}",
                f"Ray (free now: {_counts(free)}, waited {waited:.0f} s)",
                cluster.placement_timeout_s,
            )
        yield group
    finally:
        with contextlib.suppress(Exception):
            remove_placement_group(group)


def _counts(resources: dict[str, float]) -> str:
    return ", ".join(f"{resources.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU"))
