"""Risk guarded: a Ray that is already up, or was, stops a run that only wanted one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from ray._private import utils as ray_utils

from nemo_rl_moe.cluster.ray_cluster import ray_session
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.schema import ClusterConfig
from tests.shared_ray import ensure_ray

REPO = Path(__file__).resolve().parents[3]
CPU = ClusterConfig(device="cpu")
JOIN = """
import ray
from nemo_rl_moe.cluster.ray_cluster import ray_session
from nemo_rl_moe.recipe.schema import ClusterConfig
with ray_session(ClusterConfig(device="cpu")):
    print(ray.get_runtime_context().gcs_address)
"""


def test_a_run_joins_the_ray_that_ray_start_recorded_while_ray_address_is_unset(tmp_path: Path) -> None:
    ensure_ray()
    address = ray.get_runtime_context().gcs_address
    # What `ray start` leaves behind: its address, in the folder that RAY_TMPDIR names.
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/ray_current_cluster").write_text(address)
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    joined = subprocess.run(
        [sys.executable, "-c", JOIN],
        env={**env, "RAY_TMPDIR": str(tmp_path), "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert joined.stdout.strip() == address, joined.stderr
    assert ray.is_initialized() and ray.cluster_resources()["CPU"] == 4


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """What Ray is told, without starting one."""
    told: list[dict] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "init", lambda **options: told.append(options))
    return told


def started_with(monkeypatch: pytest.MonkeyPatch, calls: list[dict], record: str | None) -> dict:
    monkeypatch.setattr(ray_utils, "read_ray_address", lambda: record)
    with ray_session(CPU):
        pass
    return calls[-1]


def test_only_a_record_that_something_answers_at_is_joined(monkeypatch, calls) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        alive = f"127.0.0.1:{server.getsockname()[1]}"
        assert {"address", "object_store_memory"}.isdisjoint(started_with(monkeypatch, calls, alive))
    for gone in (alive, "", "no address", None):
        options = started_with(monkeypatch, calls, gone)
        assert (options["address"], options["object_store_memory"]) == ("local", 512 << 20)


def test_ray_is_told_before_it_starts_not_to_print_the_errors_of_a_failed_ranks_peers(monkeypatch, calls) -> None:
    monkeypatch.delenv("RAY_IGNORE_UNHANDLED_ERRORS", raising=False)
    monkeypatch.setattr(ray, "init", lambda **options: calls.append(dict(os.environ)))
    assert started_with(monkeypatch, calls, None)["RAY_IGNORE_UNHANDLED_ERRORS"] == "1"


def test_ray_address_wins_over_the_record_and_local_asks_for_a_new_ray(monkeypatch, calls) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert {"address", "object_store_memory"}.isdisjoint(started_with(monkeypatch, calls, None))
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert started_with(monkeypatch, calls, "127.0.0.1:1")["object_store_memory"] == 512 << 20


def test_a_ray_that_cannot_be_reached_is_the_users_to_correct(monkeypatch, calls) -> None:
    def refused(**options):
        raise ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379")

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(ray, "init", refused)
    with (
        pytest.raises(UserError, match=r"Ray at 10.0.0.1:6379: Failed to connect.*RAY_ADDRESS=local"),
        ray_session(CPU),
    ):
        pass


def test_devices_share_cores_only_where_the_recipe_says_so(calls: list[dict], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_utils, "get_num_cpus", lambda: 2)
    for gpus_per_node in (1, 3):
        with ray_session(ClusterConfig(device="cpu", gpus_per_node=gpus_per_node, oversubscribe_cpus=True)):
            pass
    with ray_session(ClusterConfig(device="cpu", gpus_per_node=3)):
        pass
    assert [options.get("num_cpus") for options in calls] == [2, 3, None]
