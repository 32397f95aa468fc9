"""Risk guarded: a worker that dies, hangs or refuses is named at once, never hidden behind peers that wait for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_rl_moe.cluster.ray_cluster import check_resources, ray_session, reserve_devices
from nemo_rl_moe.cluster.worker_group import WorkerDied, WorkerFailed, WorkerGroup, WorkerSpec
from nemo_rl_moe.errors import PhaseTimeout, RunFailed, UserError
from nemo_rl_moe.recipe.schema import ClusterConfig
from tests.shared_ray import ensure_ray

TWO_DEVICES = ClusterConfig(device="cpu", gpus_per_node=2, placement_timeout_s=5)


@pytest.fixture(scope="module")
def session():
    ensure_ray()
    with ray_session(TWO_DEVICES):
        yield


@contextlib.contextmanager
def echo_group(log_dir: Path) -> Iterator[WorkerGroup]:
    with reserve_devices(TWO_DEVICES) as placement:
        specs = [WorkerSpec(bundle=r, num_cpus=0.5, num_gpus=0, args=(r,)) for r in range(2)]
        workers = WorkerGroup(
            "policy", "tests.unit.cluster.workers.Echo", specs, placement, {"RECIPE_VALUE": "7"}, log_dir
        )
        yield workers
        workers.kill()


@pytest.fixture(scope="module")
def group(session, tmp_path_factory):
    """Shared by the tests that leave it whole: actors take seconds to start."""
    with echo_group(tmp_path_factory.mktemp("logs")) as workers:
        yield workers


@pytest.fixture
def doomed_group(session, group, tmp_path: Path):
    with echo_group(tmp_path) as workers:
        workers.pids()
        yield workers


def test_results_come_in_rank_order_with_each_worker_its_own_arguments(group: WorkerGroup) -> None:
    assert group.call("add", 10, phase="p", timeout_s=60, per_worker=[(1,), (2,)]) == [(0, 11), (1, 12)]
    assert group.call_rank(1, "add", 5, phase="p", timeout_s=60) == (1, 5)


def test_a_value_put_once_reaches_both_ranks_as_itself(group: WorkerGroup) -> None:
    handle = group.put(30)
    assert group.call("add", 10, phase="p", timeout_s=60, per_worker=[(handle,), (handle,)]) == [(0, 40), (1, 40)]


def test_workers_start_with_the_recipes_environment(group: WorkerGroup) -> None:
    assert group.call("environment", "RECIPE_VALUE", phase="p", timeout_s=60) == ["7", "7"]


def test_a_rank_that_does_not_answer_is_named_with_the_phase_after_half_a_second(doomed_group: WorkerGroup) -> None:
    started = time.monotonic()
    with pytest.raises(PhaseTimeout, match=r"training: no answer from policy rank 1 within 0.5 s"):
        doomed_group.call("sleep_on", 1, 30.0, phase="training", timeout_s=0.5)
    assert time.monotonic() - started < 5


def test_a_dead_rank_is_reported_within_seconds_with_its_last_words(doomed_group: WorkerGroup) -> None:
    started = time.monotonic()
    with pytest.raises(WorkerDied, match=r"(?s)training: policy rank 0 died.*last words of the worker"):
        doomed_group.call("exit_on", 0, phase="training", timeout_s=60)
    assert time.monotonic() - started < 20


def test_a_failing_rank_does_not_hide_behind_one_that_waits_for_it(doomed_group: WorkerGroup) -> None:
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"training: policy rank 1 failed: ValueError\('wrong shape'\)"):
        doomed_group.call("fail_on", 1, phase="training", timeout_s=60)
    assert time.monotonic() - started < 20


def test_a_users_mistake_found_in_a_worker_arrives_as_a_user_error(group: WorkerGroup) -> None:
    with pytest.raises(UserError, match="prompt 3 has 9 tokens"):
        group.call("refuse", phase="generation", timeout_s=60)


def test_a_worker_that_foresaw_its_end_ends_the_run_with_its_reason_and_leaves_the_traceback_in_its_log(
    group: WorkerGroup,
) -> None:
    with pytest.raises(WorkerFailed, match=r"refit: policy rank \d: the engine is unusable: half") as caught:
        group.call("give_up", phase="refit", timeout_s=60)
    # The command line prints a RunFailed as one line.
    assert isinstance(caught.value, RunFailed)
    assert "Traceback" not in str(caught.value)
    log = Path(str(caught.value).rpartition("its log: ")[2].rstrip(")"))
    assert "in give_up" in log.read_text()


def test_a_recipe_for_16_gpus_on_a_host_without_any_fails_within_2_seconds_with_needed_and_found(session) -> None:
    started = time.monotonic()
    with pytest.raises(
        UserError, match=r"needs 2 node\(s\) with 8 GPU each, 16 in all; found 1 node.*0 in all.*device=cpu"
    ):
        check_resources(ClusterConfig(device="cuda", gpus_per_node=8, num_nodes=2))
    assert time.monotonic() - started < 2


def test_devices_that_another_run_holds_are_a_timeout_that_says_what_is_free(session) -> None:
    three_of_four = ClusterConfig(device="cpu", gpus_per_node=3, placement_timeout_s=1)
    with (
        reserve_devices(TWO_DEVICES),
        pytest.raises(PhaseTimeout, match=r"placement of 3 x .*free now: [0-2] CPU"),
        reserve_devices(three_of_four),
    ):
        pass
