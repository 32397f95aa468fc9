"""A group of Ray actors that work as one: the same call to each rank, every wait with a limit."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl_moe.cluster.actor_host import ActorHost, AsyncActorHost
from nemo_rl_moe.errors import PhaseTimeout, RunFailed, UserError
from nemo_rl_moe.limits import RESULT_S

_LOG_TAIL_LINES = 15
# Ray runs at most this many calls of one concurrent actor at once. A weight update behind that many waiting generation
# calls would wait for ever, so it is out of reach.
_MAX_CONCURRENT_CALLS = 1_000_000


class WorkerFailed(RuntimeError):
    """A call to a worker raised.

    Attributes:
        rank: of the worker.
        life: how many times its process had been started anew when the call was made.
    """

    def __init__(self, message: str, rank: int, life: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.life = life


class WorkerGaveUp(WorkerFailed, RunFailed):
    """A worker cannot go on, for a reason that it foresaw: it raised `RunFailed`."""


class WorkerDied(WorkerFailed, RunFailed):
    """A worker process ended while something was asked of it."""


@dataclass(frozen=True)
class WorkerSpec:
    """Where and how one worker runs.

    Attributes:
        bundle: index of its bundle in the placement group.
        num_cpus: share of CPU cores that Ray books for it.
        num_gpus: share of GPUs that Ray books for it.
        args: arguments of the hosted class.
    """

    bundle: int
    num_cpus: float
    num_gpus: float
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Call:
    """A call under way: the rank that works on it, and which life of the rank (see `WorkerFailed`)."""

    ref: ray.ObjectRef
    rank: int
    life: int


class WorkerGroup:
    """Actors of one kind, by rank.

    Args:
        name: what they are called in errors and logs, such as `policy`.
        class_path: dotted path of the hosted class, imported in the workers only.
        specs: one for each rank.
        placement: the placement group that holds the bundles.
        env: environment variables that the worker processes start with.
        log_dir: folder of `<name>-<rank>.log`; None leaves the output to Ray.
        concurrent: the hosted class has coroutines, and calls to one worker may overlap.
    """

    def __init__(
        self,
        name: str,
        class_path: str,
        specs: Sequence[WorkerSpec],
        placement: PlacementGroup,
        env: dict[str, str],
        log_dir: Path | None,
        *,
        concurrent: bool = False,
    ) -> None:
        self.name = name
        self._class_path, self._specs, self._placement, self._env = class_path, list(specs), placement, env
        self._logs = [log_dir / f"{name}-{rank}.log" if log_dir else None for rank in range(len(specs))]
        self._concurrent = concurrent
        self._actors = [self._start(rank) for rank in range(len(specs))]
        self._lives = [0] * len(specs)

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self._actors)

    def life(self, rank: int) -> int:
        """How many times the rank's process was started anew."""
        return self._lives[rank]

    def call(
        self,
        method: str,
        *args: Any,
        phase: str,
        timeout_s: float,
        per_worker: Sequence[tuple[Any, ...]] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Calls the method on every worker and returns the results in rank order.

        Args:
            phase: what this is, for errors.
            timeout_s: limit in seconds for all of them together.
            per_worker: further positional arguments, one tuple for each rank.

        Raises:
            PhaseTimeout: naming the phase and the ranks that had not answered.
            WorkerDied: naming the rank, with the end of its log.
            WorkerFailed: the first call that raised.
        """
        calls = self._submit_all(method, args, per_worker, kwargs)
        results: dict[int, Any] = {}
        # One at a time as they finish: a rank that fails must not hide behind peers that wait for it.
        deadline = time.monotonic() + timeout_s
        while calls:
            for call in self.wait_any(calls, deadline, phase, timeout_s):
                calls.remove(call)
                results[call.rank] = self.result(call, phase)
        return [results[rank] for rank in range(self.size)]

    def put(self, value: Any) -> Any:
        """A handle that a call takes in the value's place as a positional argument.

        What several ranks get is then pickled and copied once. It is kept for as long as the handle is.
        """
        return ray.put(value)

    def call_each(
        self,
        method: str,
        *args: Any,
        phase: str,
        timeout_s: float,
        per_worker: Sequence[tuple[Any, ...]] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """As `call`, but waits for all: a worker that died or raised has its `WorkerFailed` in place of a result."""
        calls = self._submit_all(method, args, per_worker, kwargs)
        results: list[Any] = [None] * self.size
        deadline = time.monotonic() + timeout_s
        while calls:
            for call in self.wait_any(calls, deadline, phase, timeout_s):
                calls.remove(call)
                try:
                    results[call.rank] = self.result(call, phase)
                except WorkerFailed as error:
                    results[call.rank] = error
        return results

    def call_rank(self, rank: int, method: str, *args: Any, phase: str, timeout_s: float, **kwargs: Any) -> Any:
        """Calls the method on one worker."""
        call = self.submit(rank, method, *args, **kwargs)
        self.wait_any([call], time.monotonic() + timeout_s, phase, timeout_s)
        return self.result(call, phase)

    def submit(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Call:
        """Starts a call and returns at once."""
        return Call(self._actors[rank].call.remote(method, *args, **kwargs), rank, self._lives[rank])

    def _submit_all(
        self, method: str, args: tuple[Any, ...], per_worker: Sequence[tuple[Any, ...]] | None, kwargs: dict[str, Any]
    ) -> list[Call]:
        own = per_worker if per_worker is not None else [()] * self.size
        if len(own) != self.size:
            raise ValueError(f"{len(own)} argument tuples for {self.size} workers")
        return [self.submit(rank, method, *args, *extra, **kwargs) for rank, extra in enumerate(own)]

    def wait_any(self, calls: Sequence[Call], deadline: float, phase: str, limit_s: float) -> list[Call]:
        """Waits until one of the calls is done or has failed; returns all that are.

        Raises:
            PhaseTimeout: none is by the deadline (of `time.monotonic`); names the ranks. `limit_s` is for its message.
        """
        done = self.poll(calls, max(0.0, deadline - time.monotonic()))
        if not done:
            late = ", ".join(map(str, sorted({call.rank for call in calls})))
            raise PhaseTimeout(phase, f"{self.name} rank {late}", limit_s)
        return done

    def poll(self, calls: Sequence[Call], timeout_s: float) -> list[Call]:
        """The calls that are done or have failed; when none is, waits for one for `timeout_s` at most."""
        by_ref = {call.ref: call for call in calls}
        done, rest = ray.wait(list(by_ref), num_returns=1, timeout=timeout_s)
        if done and rest:
            done += ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        return [by_ref[ref] for ref in done]

    def result(self, call: Call, phase: str) -> Any:
        """What a call that is done returned.

        Raises:
            UserError, PhaseTimeout: the worker raised it.
            WorkerGaveUp: it raised another `RunFailed`.
            WorkerDied, WorkerFailed: it died, or raised anything else.
        """
        rank = call.rank
        try:
            return ray.get(call.ref, timeout=RESULT_S)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, UserError | PhaseTimeout):
                raise cause from None
            if isinstance(cause, RunFailed):
                where = f" (its log: {self._logs[rank]})" if self._logs[rank] else ""
                raise WorkerGaveUp(f"{phase}: {self.name} rank {rank}: {cause}{where}", rank, call.life) from None
            message = f"{phase}: {self.name} rank {rank} failed: {cause!r}\n{error}"
            raise WorkerFailed(message, rank, call.life) from cause
        except RayActorError as error:
            message = f"{phase}: {self.name} rank {rank} died: {error}{self._log_tail(rank)}"
            raise WorkerDied(message, rank, call.life) from None
        except GetTimeoutError:
            raise PhaseTimeout(f"{phase}: result transfer", f"{self.name} rank {rank}", RESULT_S) from None

    def restart(self, rank: int) -> None:
        """Ends the rank's process if it still runs and starts a new one in its place; calls under way fail."""
        with contextlib.suppress(Exception):
            ray.kill(self._actors[rank], no_restart=True)
        self._lives[rank] += 1
        self._actors[rank] = self._start(rank)

    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return ray.get([actor.pid.remote() for actor in self._actors], timeout=RESULT_S)

    def kill(self) -> None:
        """Ends all worker processes at once."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors = []

    def _start(self, rank: int) -> ActorHandle:
        spec, log = self._specs[rank], self._logs[rank]
        host = ray.remote(AsyncActorHost if self._concurrent else ActorHost)
        options: dict[str, Any] = {"max_concurrency": _MAX_CONCURRENT_CALLS} if self._concurrent else {}
        return host.options(
            num_cpus=spec.num_cpus,
            num_gpus=spec.num_gpus,
            runtime_env={"env_vars": self._env},
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement, spec.bundle),
            **options,
        ).remote(self._class_path, spec.args, str(log) if log else None, os.getcwd())

    def _log_tail(self, rank: int) -> str:
        log = self._logs[rank]
        if log is None or not log.exists():
            return ""
        lines = log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return f"\nlast lines of {log}:\n  " + "\n  ".join(lines)
