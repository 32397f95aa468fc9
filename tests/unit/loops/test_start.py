"""Risk guarded: a start that fails or is interrupted waits minutes for the other side's set-up. On real Ray."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_rl_moe.cluster.ray_cluster import reserve_devices
from nemo_rl_moe.cluster.worker_group import WorkerGroup, WorkerSpec
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.loops.build import set_up, side_by_side
from nemo_rl_moe.recipe.schema import ClusterConfig
from tests.shared_ray import ensure_ray


@contextlib.contextmanager
def two_groups(log_dir: Path) -> Iterator[list[WorkerGroup]]:
    """Trainer and generator of one worker each, up and running."""
    ensure_ray()
    with reserve_devices(ClusterConfig(device="cpu", gpus_per_node=2, placement_timeout_s=5)) as placement:
        groups = [
            WorkerGroup(name, "tests.unit.cluster.workers.Echo", [WorkerSpec(i, 0.5, 0, (0,))], placement, {}, log_dir)
            for i, name in enumerate(("policy", "generation"))
        ]
        try:
            for group in groups:
                group.pids()
            yield groups
        finally:
            for group in groups:
                group.kill()


class FakeSide:
    """Notes what it is asked to do, for the order on a device that this machine does not have."""

    def __init__(self, name: str, asked: list[str]) -> None:
        self.setup = lambda: asked.append(f"{name} set-up")
        self.sleep = lambda: asked.append(f"{name} sleep")


def test_where_memory_is_shared_the_generator_starts_alone_and_sleeps_before_the_trainer_starts() -> None:
    asked: list[str] = []
    set_up(FakeSide("policy", asked), FakeSide("generator", asked), [], in_turn=True)  # type: ignore[arg-type]
    assert asked == ["generator set-up", "generator sleep", "policy set-up"]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_set_up_that_fails_ends_one_that_would_take_60_s_within_10_s(tmp_path: Path, failing: int) -> None:
    with two_groups(tmp_path) as groups:
        setups = [
            lambda: groups[failing].call("refuse", phase="set-up", timeout_s=60),
            lambda: groups[1 - failing].call("sleep_on", 0, 60.0, phase="set-up", timeout_s=60),
        ]
        started = time.monotonic()
        with pytest.raises(UserError, match="prompt 3 has 9 tokens"):
            side_by_side(setups if failing == 0 else setups[::-1], groups)
        assert time.monotonic() - started < 10


def test_an_interrupt_ends_two_set_ups_that_would_take_60_s_within_10_s(tmp_path: Path) -> None:
    with two_groups(tmp_path) as groups:
        setups = [lambda g=g: g.call("sleep_on", 0, 60.0, phase="set-up", timeout_s=60) for g in groups]
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            side_by_side(setups, groups)
        assert time.monotonic() - started < 10
