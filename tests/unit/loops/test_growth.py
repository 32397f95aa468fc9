"""Risk guarded: a controller whose work for a sample grows with the number of samples.

Counted are calls and allocated bytes, which no load can change; `tools/bench_controller.py` has the seconds.
"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_rl_moe.data.prompt import Prompt
from nemo_rl_moe.generation.generator import worker_arguments
from nemo_rl_moe.loops.components import Run
from nemo_rl_moe.loops.report import rollout_metrics
from nemo_rl_moe.loops.rollout import Rollouts, sampling_spec, score
from nemo_rl_moe.loops.step import train_on
from nemo_rl_moe.policy.policy import Policy
from nemo_rl_moe.recipe.schema import Recipe
from tests.unit.loops.fake_workers import FakePolicy, FakeWorkers, make_run
from tests.unit.loops.test_async_loop import BASE
from tools.bench.controller_workers import FakeGenerationWorker, FakePolicyWorker

GROUP, PROMPT_TOKENS, RANKS = 16, 8, 4
FEW, MANY = 16, 128


class InProcess:
    """Has the interface of a `WorkerGroup` of the benchmark's trainer."""

    def __init__(self, recipe: Recipe) -> None:
        plain = recipe.model_dump(mode="json")
        self._workers = [FakePolicyWorker(plain, rank, RANKS) for rank in range(RANKS)]

    def put(self, value: Any) -> Any:
        return value

    def call_rank(self, rank: int, method: str, *args: Any, phase: str, timeout_s: float) -> Any:
        return getattr(self._workers[rank], method)(*args)

    def call(
        self,
        method: str,
        *args: Any,
        phase: str,
        timeout_s: float,
        per_worker: Sequence[tuple] | None = None,
        **keys: Any,
    ) -> list[Any]:
        own = per_worker or [()] * RANKS
        return [getattr(w, method)(*args, *extra, **keys) for w, extra in zip(self._workers, own, strict=True)]


def one_step(prompts: int, folder: Path) -> Callable[[], None]:
    """What the controller does with a step's samples: joins, scores, shapes, shards, counts."""
    grpo = BASE.grpo.model_copy(update={"num_prompts_per_step": prompts, "num_generations_per_prompt": GROUP})
    policy = BASE.policy.model_copy(update={"train_global_batch_size": prompts * GROUP, "train_micro_batch_size": 8})
    recipe = BASE.model_copy(update={"grpo": grpo, "policy": policy})
    trainer = Policy(InProcess(recipe), recipe)  # type: ignore[arg-type]
    trainer.setup()
    run: Run = replace(make_run(recipe, prompts, FakeWorkers(), FakePolicy(), folder), policy=trainer)
    rows = [Prompt(i, [i] * (1 + i % PROMPT_TOKENS), "", "arithmetic") for i in range(prompts)]
    spec, worker = sampling_spec(run, 1), FakeGenerationWorker({}, 0)
    sampled = [worker.generate(*worker_arguments([row], spec, np.zeros(1, dtype=np.int64))) for row in rows]

    def step() -> None:
        parts = [score(run, [row], own, GROUP) for row, own in zip(rows, sampled, strict=True)]
        rollouts = Rollouts.concat(parts, {})
        assert len(rollouts.batch) == prompts * GROUP
        train_on(run, rollouts)
        rollout_metrics(run, rollouts)

    return step


def calls_and_bytes(step: Callable[[], None]) -> tuple[int, int]:
    """Function calls of a step, Python's and C's, and the most bytes that it held at once, numpy's included."""
    step()  # what is made once and kept
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    tracemalloc.start()
    try:
        step()
        return calls, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def growth(tmp_path_factory: pytest.TempPathFactory) -> tuple[float, float]:
    """By how much calls and bytes grow from 256 samples to 2,048."""
    folder = tmp_path_factory.mktemp("run")
    few, many = (calls_and_bytes(one_step(prompts, folder)) for prompts in (FEW, MANY))
    return many[0] / few[0], many[1] / few[1]


def test_8_times_the_samples_take_at_most_8_times_the_calls(growth: tuple[float, float]) -> None:
    assert 2 < growth[0] <= MANY / FEW


def test_8_times_the_samples_take_at_most_8_times_the_memory(growth: tuple[float, float]) -> None:
    # The rest is bookkeeping; one byte for each pair of samples would more than double it.
    assert 2 < growth[1] <= 1.02 * MANY / FEW
