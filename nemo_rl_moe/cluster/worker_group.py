"""A group of Ray actors that work as one: the same call to each rank, every wait with a limit."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl_moe.cluster.actor_host import ActorHost
from nemo_rl_moe.errors import PhaseTimeout, RunFailed, UserError

_LOG_TAIL_LINES = 15


class WorkerDied(RunFailed):
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


class WorkerGroup:
    """Actors of one kind, by rank.

    Args:
        name: what they are called in errors and logs, such as `policy`.
        class_path: dotted path of the hosted class, imported in the workers only.
        specs: one for each rank.
        placement: the placement group that holds the bundles.
        env: environment variables that the worker processes start with.
        log_dir: folder of `<name>-<rank>.log`; None leaves the output to Ray.
    """

    def __init__(
        self,
        name: str,
        class_path: str,
        specs: Sequence[WorkerSpec],
        placement: PlacementGroup,
        env: dict[str, str],
        log_dir: Path | None,
    ) -> None:
        self.name = name
        self._logs = [log_dir / f"{name}-{rank}.log" if log_dir else None for rank in range(len(specs))]
        host = ray.remote(ActorHost)
        self._actors = [
            host.options(
                num_cpus=spec.num_cpus,
                num_gpus=spec.num_gpus,
                runtime_env={"env_vars": env},
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement, spec.bundle),
            ).remote(class_path, spec.args, str(log) if log else None, os.getcwd())
            for spec, log in zip(specs, self._logs, strict=True)
        ]

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self._actors)

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
        """
        own = per_worker if per_worker is not None else [()] * self.size
        if len(own) != self.size:
            raise ValueError(f"{len(own)} argument tuples for {self.size} workers")
        return self._collect(
            [a.call.remote(method, *args, *extra, **kwargs) for a, extra in zip(self._actors, own, strict=True)],
            list(range(self.size)),
            phase,
            timeout_s,
        )

    def call_rank(self, rank: int, method: str, *args: Any, phase: str, timeout_s: float, **kwargs: Any) -> Any:
        """Calls the method on one worker."""
        return self._collect([self._actors[rank].call.remote(method, *args, **kwargs)], [rank], phase, timeout_s)[0]

    def pids(self, timeout_s: float = 60.0) -> list[int]:
        """Process ids, by rank."""
        return self._collect([a.pid.remote() for a in self._actors], list(range(self.size)), "pid", timeout_s)

    def kill(self) -> None:
        """Ends all worker processes at once."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors = []

    def _collect(self, refs: list[ray.ObjectRef], ranks: list[int], phase: str, timeout_s: float) -> list[Any]:
        """One at a time as they finish: a rank that fails must not hide behind peers that wait for it."""
        deadline = time.monotonic() + timeout_s
        rank_of = dict(zip(refs, ranks, strict=True))
        results: dict[int, Any] = {}
        pending = list(refs)
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                late = ", ".join(str(rank_of[ref]) for ref in pending)
                raise PhaseTimeout(phase, f"{self.name} rank {late}", timeout_s)
            results[rank_of[done[0]]] = self._result(done[0], rank_of[done[0]], phase)
        return [results[rank] for rank in ranks]

    def _result(self, ref: ray.ObjectRef, rank: int, phase: str) -> Any:
        try:
            return ray.get(ref, timeout=60.0)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, UserError | PhaseTimeout):
                raise cause from None
            raise RuntimeError(f"{phase}: {self.name} rank {rank} failed: {cause!r}\n{error}") from cause
        except RayActorError as error:
            raise WorkerDied(f"{phase}: {self.name} rank {rank} died: {error}{self._log_tail(rank)}") from None
        except GetTimeoutError:
            raise PhaseTimeout(f"{phase}: result transfer", f"{self.name} rank {rank}", 60.0) from None

    def _log_tail(self, rank: int) -> str:
        log = self._logs[rank]
        if log is None or not log.exists():
            return ""
        lines = log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return f"\nlast lines of {log}:\n  " + "\n  ".join(lines)
