"""Generation calls under way on several workers: who gets the next one, and what has come back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from nemo_rl_moe.cluster.worker_group import Call, WorkerFailed
from nemo_rl_moe.data.prompt import Prompt
from nemo_rl_moe.errors import PhaseTimeout
from nemo_rl_moe.generation.generator import Generator, worker_arguments
from nemo_rl_moe.generation.interface import Completions, SamplingSpec
from nemo_rl_moe.recipe.schema import Recipe

Tag = TypeVar("Tag")


@dataclass(frozen=True)
class Answer(Generic[Tag]):
    """What became of a call: one prompt's responses, or the failure of its worker."""

    tag: Tag
    outcome: Completions | WorkerFailed


@dataclass
class _Pending(Generic[Tag]):
    call: Call
    tags: list[Tag]
    spec: SamplingSpec
    since: float


class Dispatcher(Generic[Tag]):
    """Keeps many prompts under way.

    Args:
        generator: whose workers it uses.
        recipe: for routing and time limits.
    """

    def __init__(self, generator: Generator, recipe: Recipe) -> None:
        self._generator = generator
        self._routing = recipe.grpo.async_grpo.request_routing
        self._limit = recipe.cluster.timeouts.generation_s
        self._pending: dict[Call, _Pending[Tag]] = {}
        self._load = [0] * generator.size
        self._next = 0

    def __len__(self) -> int:
        """Calls under way."""
        return len(self._pending)

    def send(self, tag: Tag, prompt: Prompt, spec: SamplingSpec, first_sample: int) -> None:
        """Gives one prompt to a worker.

        Args:
            tag: comes back with the answer.
            first_sample: number of its first response, for the seeds (`generator.first_samples`).
        """
        rank = self._choose()
        self._start(rank, [tag], worker_arguments([prompt], spec, np.array([first_sample])), spec, together=False)

    def send_together(self, tags: Sequence[Tag], prompts: Sequence[Prompt], spec: SamplingSpec) -> None:
        """Gives a whole step's prompts to all workers as `Generator.generate` would, for the same bits."""
        done = 0
        for rank, arguments in enumerate(self._generator.arguments(prompts, spec)):
            own = list(tags[done : done + len(arguments[0])])
            done += len(own)
            if own:
                self._start(rank, own, arguments, spec, together=True)

    def collect(self, timeout_s: float) -> list[Answer[Tag]]:
        """What has come back; when nothing has, waits `timeout_s` at most.

        Raises:
            UserError: a prompt is empty or too long for the engine.
            PhaseTimeout: a call was under way for longer than `cluster.timeouts.generation_s`.
        """
        answers: list[Answer[Tag]] = []
        for call in self._generator.workers.poll(list(self._pending), timeout_s):
            pending = self._pending.pop(call)
            self._load[call.rank] -= len(pending.tags)
            outcomes: Sequence[Completions | WorkerFailed]
            try:
                outcomes = self._generator.workers.result(call, "generation").split(pending.spec.n)
            except WorkerFailed as error:
                outcomes = [error] * len(pending.tags)
            answers += [Answer(tag, outcome) for tag, outcome in zip(pending.tags, outcomes, strict=True)]
        self._check_late()
        return answers

    def _choose(self) -> int:
        """Round robin breaks ties of the least loaded, so that idle workers take turns."""
        order: NDArray[np.int64] = (np.arange(len(self._load)) + self._next) % len(self._load)
        rank = int(order[0] if self._routing == "round_robin" else min(order, key=self._load.__getitem__))
        self._next = rank + 1
        return rank

    def _start(
        self, rank: int, tags: list[Tag], arguments: tuple[Any, ...], spec: SamplingSpec, *, together: bool
    ) -> None:
        call = self._generator.submit(rank, arguments, together=together)
        self._pending[call] = _Pending(call, tags, spec, time.monotonic())
        self._load[rank] += len(tags)

    def _check_late(self) -> None:
        now = time.monotonic()
        late = sorted({p.call.rank for p in self._pending.values() if now - p.since > self._limit})
        if late:
            raise PhaseTimeout("generation", f"generation rank {', '.join(map(str, late))}", self._limit)
