"""Generation workers and a trainer that only keep time, count and fail, around the real loop.

Real are the driver, the collector, the replay buffer, the dispatcher, the generator, the data loader and checkpoints.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rl_moe.batch import SequenceBatch
from nemo_rl_moe.cluster.worker_group import Call, WorkerFailed
from nemo_rl_moe.data.loader import PromptLoader
from nemo_rl_moe.data.prompt import Prompt
from nemo_rl_moe.environments.base import ScoreRequest, ScoreResult
from nemo_rl_moe.generation.generator import Generator
from nemo_rl_moe.generation.interface import Completions, SamplingSpec
from nemo_rl_moe.loops.components import Data, Run
from nemo_rl_moe.loops.health import HealthGate
from nemo_rl_moe.recipe.plan import plan
from nemo_rl_moe.recipe.schema import Recipe
from nemo_rl_moe.refit.layout import WeightLayout
from nemo_rl_moe.refit.offer import SharedMemoryOffer
from nemo_rl_moe.tracking.timers import PhaseTimer


@dataclass
class _Sampling:
    """A call under way: when it ends, and what comes of it."""

    due: float
    outcome: Completions | WorkerFailed


class FakeWorkers:
    """Has the interface of a `WorkerGroup` that hosts `AsyncVllmWorker`.

    Args:
        size: workers.
        seconds: how long an attempt takes, by the id of its first prompt and its number over all.
        fails: whether an attempt fails, by its number; its worker dies with all that it has.
        update_fails: whether a weight update fails on a worker, by its number over all.
    """

    def __init__(
        self,
        size: int = 1,
        seconds: Callable[[int, int], float] = lambda prompt, attempt: 0.0,
        fails: Callable[[int], bool] = lambda attempt: False,
        update_fails: Callable[[int], bool] = lambda update: False,
    ) -> None:
        self.size = size
        self.name = "generation"
        self.versions = [0] * size
        self.attempts = 0
        self.updates = 0
        self.sent: list[tuple[int, list[int]]] = []
        self._seconds, self._fails, self._update_fails = seconds, fails, update_fails
        self._lives = [0] * size
        self._running: dict[Call, _Sampling] = {}
        self._lock = threading.Lock()

    def life(self, rank: int) -> int:
        return self._lives[rank]

    def submit(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Call:
        assert method == "generate"
        ids, _, _, spec, _ = args
        with self._lock:
            call = Call(object(), rank, self._lives[rank])  # type: ignore[arg-type]
            failed = self._fails(self.attempts)
            error = WorkerFailed(f"generation rank {rank} died", rank, call.life)
            outcome = error if failed else completions(len(ids), spec, self.versions[rank])
            due = time.monotonic() + self._seconds(int(ids[0]), self.attempts)
            self._running[call] = _Sampling(due, outcome)
            self.attempts += 1
            self.sent.append((rank, ids.tolist()))
            return call

    def poll(self, calls: Sequence[Call], timeout_s: float) -> list[Call]:
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                now = time.monotonic()
                done = [call for call in calls if self._running[call].due <= now]
                first = min((self._running[call].due for call in calls), default=deadline)
            if done or now >= deadline:
                return done
            time.sleep(max(0.0, min(first, deadline) - now))

    def result(self, call: Call, phase: str) -> Completions:
        with self._lock:
            outcome = self._running.pop(call).outcome
        if isinstance(outcome, WorkerFailed):
            raise outcome
        return outcome

    def restart(self, rank: int) -> None:
        """What the rank had under way fails now."""
        with self._lock:
            for call, sampling in self._running.items():
                if call.rank == rank:
                    sampling.due = 0.0
                    sampling.outcome = WorkerFailed(f"generation rank {rank} was ended", rank, call.life)
            self._lives[rank] += 1
            self.versions[rank] = 0

    def call_rank(self, rank: int, method: str, *args: Any, phase: str, timeout_s: float, **kwargs: Any) -> Any:
        if method == "update_weights":
            self._update(rank, args[-1])

    def call_each(self, method: str, *, phase: str, timeout_s: float, per_worker: Any) -> list[Any]:
        results: list[Any] = [None] * self.size
        for rank, (_, version) in enumerate(per_worker):
            try:
                self._update(rank, version)
            except WorkerFailed as error:
                results[rank] = error
        return results

    def call(self, method: str, *args: Any, phase: str, timeout_s: float, per_worker: Any = None) -> list[Any]:
        assert method == "weight_version"
        return list(self.versions)

    def _update(self, rank: int, version: int) -> None:
        with self._lock:
            number, self.updates = self.updates, self.updates + 1
            if self._update_fails(number):
                raise WorkerFailed(f"generation rank {rank} failed at version {version}", rank, self._lives[rank])
            # An engine that was started anew takes any version, the others only the next.
            assert self.versions[rank] in (0, version - 1)
            self.versions[rank] = version


def completions(prompts: int, spec: SamplingSpec, version: int) -> Completions:
    """`spec.n` responses to each prompt, begun under the version: two tokens, both the rest of the seed by 1000."""
    count, length = prompts * spec.n, 2
    return Completions(
        lengths=np.full(count, length, dtype=np.int64),
        token_ids=np.full(count * length, spec.seed % 1000, dtype=np.int32),
        logprobs=np.full(count * length, -1.0, dtype=np.float32),
        truncated=np.zeros(count, dtype=np.bool_),
        token_versions=np.full(count * length, version, dtype=np.int32),
        texts=["text"] * count,
    )


class Killed(BaseException):
    """Ends a run as a signal would."""


@dataclass
class FakePolicy:
    """Notes what it trains on, step by step.

    Attributes:
        seconds: how long a step takes.
        killed_at: number of the step, from 1 in this process, whose training ends the run; 0 is none.
        error: `token_mult_prob_error` of every step.
        prompts: first token of each group's prompt, which is the prompt's id, by step.
        versions: version of the weights that began each sample, by step.
        seeds: rest by 1000 of the seeds that drew the samples, by step.
    """

    seconds: float = 0.0
    killed_at: int = 0
    error: float = 1.0
    prompts: list[list[int]] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)
    seeds: list[set[int]] = field(default_factory=list)

    def logprobs(self, batch: SequenceBatch, reference: bool = False) -> np.ndarray:
        return np.full(len(batch.tokens), -1.0, dtype=np.float32)

    def train(self, batch: SequenceBatch) -> dict[str, float]:
        time.sleep(self.seconds)
        if len(self.prompts) + 1 == self.killed_at:
            raise Killed
        _, rows = np.unique(batch.sample_values["prompt_ids"], return_index=True)
        self.prompts.append(batch.tokens[batch.offsets[rows]].tolist())
        self.versions.append(batch.sample_values["weight_versions"].tolist())
        self.seeds.append(set(batch.tokens[batch.token_mask].tolist()))
        return {"token_mult_prob_error": self.error, "loss": 0.0}

    def save(self, folder: str) -> None:
        Path(folder).mkdir()

    def load(self, folder: str) -> None:
        assert Path(folder).is_dir()


@dataclass
class FakeSynchronizer:
    """Hands versions over without weights."""

    generator: Generator

    def sync(self, version: int) -> None:
        with self.generator.weights_held():
            self.generator.update_weights(SharedMemoryOffer("", WeightLayout.build([]), {}, version))
        assert self.generator.weight_versions() == [version] * self.generator.size


class FakeVerifiers:
    """Scores every other response 1."""

    def score(self, requests: Sequence[ScoreRequest]) -> ScoreResult:
        return ScoreResult(np.arange(len(requests), dtype=np.float32) % 2)


class Notes:
    """A tracker that remembers."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}
        self.events: list[str] = []

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.rows.setdefault(step, {}).update(metrics)

    restore = log

    def rollouts(self, step: int, samples: Sequence[dict]) -> None:
        pass

    def logged(self, step: int) -> frozenset[str]:
        return frozenset(self.rows.get(step, ()))

    def event(self, message: str) -> None:
        self.events.append(message)


def make_run(recipe: Recipe, prompts: int, workers: FakeWorkers, policy: FakePolicy, folder: Path) -> Run:
    """A run of the recipe on fake workers. A prompt is one token, its id."""
    grpo = recipe.grpo
    rows = [Prompt(i, [i], "", "math") for i in range(prompts)]
    loader = PromptLoader(rows, grpo.num_prompts_per_step, grpo.seed, recipe.data.shuffle, grpo.max_num_epochs)
    notes = Notes()
    generator = Generator(workers, recipe, notes.event)  # type: ignore[arg-type]
    parts: dict[str, Any] = {
        "policy": policy,
        "synchronizer": FakeSynchronizer(generator),
        "verifiers": FakeVerifiers(),
        "data": Data(None, loader, []),
        "tracker": notes,
    }
    return Run(
        recipe=recipe,
        plan=plan(recipe),
        generator=generator,
        timer=PhaseTimer(),
        run_dir=folder,
        health=HealthGate(grpo.token_mult_prob_error_warning),
        flops=None,
        **parts,
    )


def run_to_its_end(train: Callable[[Run], None], run: Run, limit_s: float = 20.0) -> None:
    """Runs a driver in a thread and waits for it; raises what it raised.

    Raises:
        AssertionError: it did not end within the limit.
    """
    raised: list[BaseException] = []

    def drive() -> None:
        try:
            train(run)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=drive, daemon=True)
    thread.start()
    thread.join(limit_s)
    assert not thread.is_alive(), f"deadlock at version {run.weight_version}"
    if raised:
        raise raised[0]


@contextlib.contextmanager
def killed() -> Any:
    """The block is ended by `FakePolicy.killed_at`, or ends before it."""
    with contextlib.suppress(Killed):
        yield
