"""Processes that run functions of the tests as Megatron ranks.

The CPU backend patches torch, so Megatron never runs in pytest's own process. One set of processes serves many tests,
forked from one that has imported Megatron.
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
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["tests.unit.policy.megatron_preload"])
        self._folder = tempfile.TemporaryDirectory()
        self._calls = 0
        pairs = [context.Pipe() for _ in range(size)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            context.Process(target=_serve, args=(theirs, rank, size), daemon=True)
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
                MegatronConfig and returns the ParallelLayout; they leave again after the call.
        """
        self._calls += 1
        store = str(Path(self._folder.name) / f"store_{self._calls}")
        for pipe in self._pipes:
            pipe.send((function, store, args))
        return self._gather(_CALL_LIMIT_S)

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.terminate()
            process.join(10)
        self._folder.cleanup()

    def _gather(self, limit_s: float) -> list[Any]:
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(limit_s):
                # A late answer would be taken for that of the next call.
                self.close()
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
    while True:
        try:
            function, path, args = pipe.recv()
        except EOFError:
            return

        def join(cfg: Any, path: str = path) -> Any:
            store = torch.distributed.FileStore(path, size)
            return parallel.initialize(cfg, store, rank, size, torch.device("cpu"), seed=7, timeout_s=_CALL_LIMIT_S)

        try:
            pipe.send((True, function(join, *args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
        finally:
            parallel.destroy()
