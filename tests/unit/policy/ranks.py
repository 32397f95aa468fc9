"""Processes that run functions of the tests as Megatron ranks.

The CPU backend patches torch, so Megatron never runs in pytest's own process. One set of processes serves many tests:
importing Megatron takes longer than most of them.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_LIMIT_S = 180.0


class Ranks:
    """`size` processes that call the same function, each on its rank."""

    def __init__(self, size: int) -> None:
        context = mp.get_context("spawn")
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
        answers = [self._receive(rank) for rank in range(len(self._pipes))]
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failures:
            raise RuntimeError("\n".join(failures))
        return [value for _, value in answers]

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.terminate()
            process.join(10)
        self._folder.cleanup()

    def _receive(self, rank: int) -> tuple[bool, Any]:
        if not self._pipes[rank].poll(_LIMIT_S):
            return False, f"no answer within {_LIMIT_S:g} s"
        return self._pipes[rank].recv()


def _serve(pipe: Connection, rank: int, size: int) -> None:
    os.environ.update(OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1", CUDA_VISIBLE_DEVICES="")
    import torch

    torch.set_num_threads(1)
    from nemo_rl_moe.policy.megatron import cpu_backend, parallel

    cpu_backend.install()
    while True:
        try:
            function, path, args = pipe.recv()
        except EOFError:
            return

        def join(cfg: Any, path: str = path) -> parallel.ParallelLayout:
            store = torch.distributed.FileStore(path, size)
            return parallel.initialize(cfg, store, rank, size, torch.device("cpu"), seed=7, timeout_s=_LIMIT_S)

        try:
            pipe.send((True, function(join, *args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
        finally:
            parallel.destroy()
