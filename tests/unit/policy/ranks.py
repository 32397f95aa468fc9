"""Processes that run functions of the tests as Megatron ranks.

The CPU backend patches torch, so Megatron never runs in pytest's own process. Each call has new processes, forked from
one that has imported Megatron: gloo's threads outlive the groups that they served and go on waking up.
"""

from __future__ import annotations

import multiprocessing as mp
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_START_LIMIT_S, _CALL_LIMIT_S = 300.0, 120.0


class Ranks:
    """`size` processes that call the same function, each on its rank."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._folder = tempfile.TemporaryDirectory()
        self._calls = 0
        self._processes: list[Any] = []

    def _start(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["tests.unit.policy.megatron_preload"])
        pairs = [context.Pipe() for _ in range(self._size)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            context.Process(target=_serve, args=(theirs, rank, self._size), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process, (_, theirs) in zip(self._processes, pairs, strict=True):
            process.start()
            theirs.close()
        self._gather(_START_LIMIT_S)

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Results in rank order of `function(join, *args)`.

        Args:
            function: of a module, so that the processes can import it. Its first argument joins the ranks under a
                MegatronConfig and returns the ParallelLayout; the processes end after the call.
        """
        self._calls += 1
        store = str(Path(self._folder.name) / f"store_{self._calls}")
        self._start()
        try:
            for pipe in self._pipes:
                pipe.send((function, store, args))
            return self._gather(_CALL_LIMIT_S)
        finally:
            self._stop()

    def close(self) -> None:
        """Removes what the calls left on disk."""
        self._folder.cleanup()

    def _stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes = []

    def _gather(self, limit_s: float) -> list[Any]:
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(limit_s):
                raise TimeoutError(f"rank {rank} gave no answer within {limit_s:g} s")
            answers.append(pipe.recv())
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failures:
            raise RuntimeError("\n".join(failures))
        return [value for _, value in answers]


def _serve(pipe: Connection, rank: int, size: int) -> None:
    from tests.unit.policy import megatron_preload

    torch, parallel = megatron_preload.torch, megatron_preload.parallel
    pipe.send((True, None))
    function, path, args = pipe.recv()

    def join(cfg: Any) -> Any:
        store = torch.distributed.FileStore(path, size)
        return parallel.initialize(cfg, store, rank, size, torch.device("cpu"), seed=7, timeout_s=_CALL_LIMIT_S)

    try:
        pipe.send((True, function(join, *args)))
    except Exception:
        pipe.send((False, traceback.format_exc()))
    # The pipe stays open until the parent has read and ends this process.
    pipe.poll(None)
