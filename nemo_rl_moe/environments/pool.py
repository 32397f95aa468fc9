"""Scores responses in processes that may hang or crash without taking the run with them."""

from __future__ import annotations

import contextlib
import selectors
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from nemo_rl_moe.environments.base import ScoreRequest, ScoreResult, VerifierError
from nemo_rl_moe.environments.process import VerifierHost, WorkerProcess
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.schema import EnvConfig

_MAX_CHUNK = 32
_MAX_MESSAGES = 5
# A worker that dies before it takes a sample has no sample to blame; more than this many in a row is a fault of ours
# or of the machine, and starting workers for ever would hide it.
_MAX_IDLE_DEATHS = 10


class VerifierPool:
    """The verifier processes of all environments of a run.

    A sample's time limit counts from when its worker starts on it; waiting in a queue costs it nothing. A worker that
    passes the limit or dies is replaced, and the samples it had not begun go back to the queue.

    Args:
        envs: environments by name.

    Raises:
        UserError: a verifier cannot be imported.
    """

    def __init__(self, envs: Mapping[str, EnvConfig]) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._envs: dict[str, _Environment] = {}
        try:
            for name, config in envs.items():
                self._envs[name] = _Environment(name, config)
            for env in self._envs.values():  # a second loop: the hosts import side by side
                env.host.wait_ready()
        except BaseException:
            self.close()
            raise

    def score(self, requests: Sequence[ScoreRequest]) -> ScoreResult:
        """Scores the responses. Safe to call from any thread; calls take turns.

        Raises:
            UserError: a request names no environment, or a verifier returned something that is not a finite number.
            VerifierError: a verifier failed and its environment says `on_error: fail`.
        """
        unknown = sorted({r.env_name for r in requests} - set(self._envs))
        if unknown:
            raise UserError(f"no environment {unknown[0]!r}: env defines {sorted(self._envs)}")
        result = ScoreResult(np.zeros(len(requests), dtype=np.float32))
        with self._lock:
            if self._closed:
                raise RuntimeError("the verifier pool is closed")
            _Scoring(self._envs, requests, result).run()
        return result

    def log_to(self, folder: Path) -> None:
        """Sends what the verifiers print to `<folder>/env-<name>.log`. To be called before anything is scored."""
        for env in self._envs.values():
            env.host.log_to(folder / f"env-{env.name}.log")

    def close(self) -> None:
        """Ends all verifier processes; may be called twice."""
        with self._lock:
            self._closed = True
            for env in self._envs.values():
                env.close()

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Environment:
    """One environment's host and workers."""

    def __init__(self, name: str, config: EnvConfig) -> None:
        self.name = name
        self.config = config
        self.host = VerifierHost(name, config)
        self.workers: list[WorkerProcess] = []

    def discard(self, worker: WorkerProcess) -> str:
        """Ends a worker for good. Returns how it ended."""
        self.workers.remove(worker)
        return self.host.end_worker(worker)

    def close(self) -> None:
        for worker in self.workers:
            worker.channel.close()
        self.workers.clear()
        self.host.close()


class _Scoring:
    """One call of `VerifierPool.score`: an event loop over the sockets of all busy workers."""

    def __init__(self, envs: dict[str, _Environment], requests: Sequence[ScoreRequest], result: ScoreResult) -> None:
        self.requests = requests
        self.result = result
        self.queues: dict[str, deque[int]] = {}
        for index, request in enumerate(requests):
            self.queues.setdefault(request.env_name, deque()).append(index)
        self.envs = [envs[name] for name in self.queues]
        self.selector = selectors.DefaultSelector()
        self.idle_deaths = 0

    def run(self) -> None:
        """Scores everything; whatever ends it early, no worker is left busy."""
        try:
            for env in self.envs:
                self._feed_idle(env)
            while self.selector.get_map():
                self._wait_once()
        finally:
            self.selector.close()
            for env in self.envs:
                for worker in [w for w in env.workers if w.pending]:
                    with contextlib.suppress(RuntimeError):  # a host that is gone has ended its workers already
                        env.discard(worker)

    def _feed_idle(self, env: _Environment) -> None:
        """Gives work to every idle worker, as long as there is any."""
        while self.queues[env.name] and sum(bool(w.pending) for w in env.workers) < env.config.num_workers:
            self._feed(env, self._idle_worker(env))

    def _idle_worker(self, env: _Environment) -> WorkerProcess:
        for worker in env.workers:
            if not worker.pending:
                return worker
        worker = env.host.start_worker()
        env.workers.append(worker)
        return worker

    def _feed(self, env: _Environment, worker: WorkerProcess) -> None:
        """Gives an idle worker its share of what is left: large at first, single samples at the end."""
        queue = self.queues[env.name]
        while queue:
            size = max(1, min(_MAX_CHUNK, len(queue) // (2 * env.config.num_workers)))
            indices = [queue.popleft() for _ in range(size)]
            try:
                worker.send(indices, [self._payload(i) for i in indices])
            except OSError:
                queue.extendleft(reversed(indices))
                how = env.discard(worker)
                self._count_idle_death(env, how)
                worker = self._idle_worker(env)
                continue
            self.selector.register(worker.channel, selectors.EVENT_READ, (env, worker))
            return

    def _payload(self, index: int) -> tuple[str, dict[str, Any]]:
        request = self.requests[index]
        return request.response, {"problem": request.problem, **request.metadata}

    def _wait_once(self) -> None:
        """Waits for lines or for the next time limit, whichever is first."""
        busy: list[tuple[_Environment, WorkerProcess]] = [key.data for key in self.selector.get_map().values()]
        deadline = min(worker.started + env.config.timeout_s for env, worker in busy)
        for key, _ in self.selector.select(max(0.0, deadline - time.monotonic())):
            self._read(*key.data)
        now = time.monotonic()
        for env, worker in busy:
            # Read once more before the kill: while this process slept, the sample may have been finished in time.
            if worker.pending and now >= worker.started + env.config.timeout_s and not self._read(env, worker):
                self._fail_first(env, worker, None)

    def _read(self, env: _Environment, worker: WorkerProcess) -> bool:
        """Takes in what a worker sent. Returns whether anything came (its end included)."""
        lines = worker.receive()
        if lines is None:
            self._fail_first(env, worker, "its process died")
            return True
        for kind, value in lines:
            index = worker.pending.pop(0)
            self.idle_deaths = 0
            if kind == "ok":
                self.result.rewards[index] = value
            elif kind == "raised":
                self.result.errors += 1
                self._report(env, index, f"the verifier raised {value}")
            else:
                raise UserError(
                    f"env.{env.name}.verifier: {env.config.verifier} returned {value} for {self._name(index)}, "
                    "expected one finite number for each response"
                )
        if lines and not worker.pending:
            self.selector.unregister(worker.channel)
            self._feed(env, worker)
        return bool(lines)

    def _fail_first(self, env: _Environment, worker: WorkerProcess, death: str | None) -> None:
        """Scores the sample in hand 0, puts the others back in front of the queue, and replaces the worker."""
        self.selector.unregister(worker.channel)
        index, *rest = worker.pending
        worker.pending = []
        self.queues[env.name].extendleft(reversed(rest))
        how = env.discard(worker)
        if death is None:
            self.result.timeouts += 1
            self._report(env, index, f"passed env.{env.name}.timeout_s of {env.config.timeout_s:g} s")
        else:
            self.result.errors += 1
            self._report(env, index, f"{death} ({how})")
        self._feed_idle(env)

    def _report(self, env: _Environment, index: int, what: str) -> None:
        message = f"env.{env.name}: {self._name(index)}: {what}"
        if env.config.on_error == "fail":
            raise VerifierError(message)
        if len(self.result.messages) < _MAX_MESSAGES:
            self.result.messages.append(message)

    def _name(self, index: int) -> str:
        request = self.requests[index]
        return f"sample {index} (prompt {request.prompt_id}, response {request.response[:80]!r})"

    def _count_idle_death(self, env: _Environment, how: str) -> None:
        self.idle_deaths += 1
        if self.idle_deaths > _MAX_IDLE_DEATHS:
            raise RuntimeError(f"env.{env.name}: {self.idle_deaths} verifier processes ended before a sample ({how})")
