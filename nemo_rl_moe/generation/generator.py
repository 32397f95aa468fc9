"""The generator as the driver sees it: all generation workers as one."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_rl_moe.cluster.worker_group import Call, WorkerFailed, WorkerGroup
from nemo_rl_moe.data.prompt import Prompt
from nemo_rl_moe.errors import PhaseTimeout, RunFailed
from nemo_rl_moe.generation.interface import Completions, SamplingSpec
from nemo_rl_moe.recipe.schema import Recipe
from nemo_rl_moe.refit.offer import WeightOffer


class Generator:
    """Splits prompts over the workers, keeps their weights at one version, and replaces workers that fail.

    Args:
        workers: group that hosts `VllmWorker` or `AsyncVllmWorker`.
        recipe: the run's recipe.
        on_event: told in a sentence when a worker was replaced.
    """

    def __init__(
        self, workers: WorkerGroup, recipe: Recipe, on_event: Callable[[str], None] = lambda message: None
    ) -> None:
        self._workers = workers
        self._timeouts = recipe.cluster.timeouts
        ahead = recipe.grpo.async_grpo
        # Only the async loop samples the prompts of a lost worker again.
        self._allowed_failures = ahead.max_generation_failures if ahead.enabled else 0
        self._failures = 0
        self._failure: str | None = None
        self._last_offer: WeightOffer | None = None
        self._on_event = on_event
        # Weights are written, loaded and given to a replaced worker by one thread at a time.
        self._weights = threading.RLock()

    @property
    def size(self) -> int:
        """Number of workers."""
        return self._workers.size

    @property
    def workers(self) -> WorkerGroup:
        """The group, for calls that overlap (`generation.dispatcher`)."""
        return self._workers

    def setup(self) -> list[dict[str, float]]:
        """Starts every engine. Returns what each worker's `setup` gives, by rank."""
        return self._workers.call("setup", phase="generation: engine start", timeout_s=self._timeouts.setup_s)

    def generate(self, prompts: Sequence[Prompt], spec: SamplingSpec) -> Completions:
        """Samples `spec.n` responses for each prompt, in the order of the prompts.

        Raises:
            UserError: a prompt is empty or too long for the engine.
            PhaseTimeout: naming the workers that did not answer.
            RunFailed: an engine is unusable.
            RuntimeError: the workers' weights have different versions.
        """
        self.check_usable()
        while True:
            try:
                parts = self._workers.call(
                    "generate",
                    phase="generation",
                    timeout_s=self._timeouts.generation_s,
                    per_worker=self.arguments(prompts, spec),
                )
                break
            except WorkerFailed as error:
                self.replace(error)
        completions = Completions.concat(parts)
        versions = sorted(set(completions.weight_versions.tolist()))
        if len(versions) > 1:
            raise RuntimeError(f"generation workers sampled with different weight versions: {versions}")
        return completions

    def arguments(self, prompts: Sequence[Prompt], spec: SamplingSpec) -> list[tuple[Any, ...]]:
        """Arguments of each worker's `generate`: contiguous parts of the prompts with about as many tokens in each."""
        first = first_samples(prompts, spec.n)
        bounds = split_bounds(np.array([len(p.token_ids) for p in prompts], dtype=np.int64), self._workers.size)
        return [worker_arguments(prompts[a:b], spec, first[a:b]) for a, b in itertools.pairwise(bounds)]

    def submit(self, rank: int, arguments: tuple[Any, ...], *, together: bool) -> Call:
        """Starts a generation call on one worker, whose class must be `AsyncVllmWorker`."""
        self.check_usable()
        return self._workers.submit(rank, "generate", *arguments, together=together)

    @contextmanager
    def weights_held(self) -> Iterator[None]:
        """While a thread is in here, no other updates weights or gives them to a replaced worker."""
        with self._weights:
            yield

    def update_weights(self, offer: WeightOffer) -> None:
        """Loads the weights into every engine; one that fails at it is replaced where allowed.

        Args:
            offer: must stand until the next update, for workers that are started anew.

        Raises:
            PhaseTimeout: naming the workers that did not answer; the generator then refuses to generate.
            RuntimeError: an update failed and no more workers may be replaced; so too.
        """
        phase, limit = f"refit: weight update to version {offer.version}", self._timeouts.refit_s
        with self._weights:
            self._last_offer = offer
            try:
                with ExitStack() as serving:
                    own = [
                        (serving.enter_context(offer.served_to(rank)), offer.version)
                        for rank in range(self._workers.size)
                    ]
                    results = self._workers.call_each("update_weights", phase=phase, timeout_s=limit, per_worker=own)
                for error in (result for result in results if isinstance(result, WorkerFailed)):
                    self.replace(error)
            except (RuntimeError, PhaseTimeout) as error:
                # Some engines may hold the new weights and some the old or half of each.
                self._failure = f"{phase} failed: {error}"
                raise

    def replace(self, error: WorkerFailed) -> bool:
        """Starts a failed worker anew and gives it the present weights, again if it fails at that.

        Returns:
            Whether it did: False when another thread has replaced that worker already.

        Raises:
            WorkerFailed: the error itself, when no failures are allowed.
            RunFailed: more failed than are.
        """
        with self._weights:
            if self._workers.life(error.rank) != error.life:
                return False
            while True:
                self._count_failure(error)
                try:
                    self._start_anew(error.rank)
                    return True
                except WorkerFailed as again:
                    error = again

    def _count_failure(self, error: WorkerFailed) -> None:
        if self._failures >= self._allowed_failures:
            if self._failures == 0:
                raise error
            limit = f"grpo.async_grpo.max_generation_failures is {self._allowed_failures}"
            raise RunFailed(f"a generation worker failed again, and {limit}: {error}") from error
        self._failures += 1
        self._on_event(
            f"warning: {str(error).splitlines()[0].rstrip('.')}: starting it anew "
            f"({self._failures} of at most {self._allowed_failures} between two steps)"
        )

    def _start_anew(self, rank: int) -> None:
        limits = self._timeouts
        self._workers.restart(rank)
        self._workers.call_rank(rank, "setup", phase="generation: engine start anew", timeout_s=limits.setup_s)
        if (offer := self._last_offer) is not None:
            phase = f"refit: version {offer.version} for a worker started anew"
            with offer.served_to(rank) as update:
                own = (update, offer.version)
                self._workers.call_rank(rank, "update_weights", *own, phase=phase, timeout_s=limits.refit_s)

    def step_done(self) -> None:
        """A step was trained: failures are counted from 0 again."""
        self._failures = 0

    def check_usable(self) -> None:
        """Raises RunFailed when an update failed."""
        if self._failure is not None:
            raise RunFailed(f"the generator is unusable: {self._failure}")

    def weight_versions(self) -> list[int]:
        """Version of each worker's weights, by rank."""
        while True:
            try:
                return self._workers.call(
                    "weight_version", phase="refit: weight versions", timeout_s=self._timeouts.refit_s
                )
            except WorkerFailed as error:
                self.replace(error)

    def sleep(self) -> None:
        """Gives the devices' memory to the trainer (see `VllmWorker.sleep`)."""
        self._workers.call("sleep", phase="generation: sleep", timeout_s=self._timeouts.refit_s)

    def wake(self, tags: list[str] | None = None) -> None:
        """Takes the memory again, or the given part of it (see `VllmWorker.wake`)."""
        self._workers.call("wake", tags, phase="generation: wake", timeout_s=self._timeouts.refit_s)

    def shutdown(self) -> None:
        """Ends every engine."""
        self._workers.call("shutdown", phase="generation: shutdown", timeout_s=self._timeouts.refit_s)


def first_samples(prompts: Sequence[Prompt], n: int) -> NDArray[np.int64]:
    """int64 [P]: number of each prompt's first response, n more for each earlier prompt with the same id."""
    seen: dict[int, int] = {}
    first = np.zeros(len(prompts), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        first[row] = seen.get(prompt.id, 0)
        seen[prompt.id] = seen.get(prompt.id, 0) + n
    return first


def split_bounds(lengths: NDArray[np.int64], parts: int) -> list[int]:
    """[parts + 1] bounds of contiguous parts with about the same number of tokens in each.

    Args:
        lengths: int64 [P], tokens of each prompt.
        parts: number of parts; some are empty when there are fewer prompts.
    """
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    # Each prompt goes where its middle lies, so that a part is off by half a prompt at most on either side.
    middles = ends - lengths / 2
    inner = [int(np.searchsorted(middles, total * part / parts)) for part in range(1, parts)]
    return [0, *inner, len(lengths)]


def worker_arguments(prompts: Sequence[Prompt], spec: SamplingSpec, first: NDArray[np.int64]) -> tuple[Any, ...]:
    """Arguments of a worker's `generate` for these prompts: ids, lengths, tokens, spec and first samples."""
    ids = np.array([p.id for p in prompts], dtype=np.int64)
    lengths = np.array([len(p.token_ids) for p in prompts], dtype=np.int64)
    rows = [np.asarray(p.token_ids, dtype=np.int32) for p in prompts]
    return ids, lengths, np.concatenate(rows) if rows else np.zeros(0, dtype=np.int32), spec, first
