"""Trainer ranks as plain processes with the call interface of a WorkerGroup, so that tests start them once.

Each recipe has new processes, forked from one that has imported Megatron: gloo's threads outlive the groups that they
served, wake up many times a second, and a few dozen recipes later would leave nothing of the machine to the tests.
"""

from __future__ import annotations

import multiprocessing as mp
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from nemo_rl_moe.batch import SequenceBatch
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.policy.policy import Policy
from nemo_rl_moe.recipe.schema import Recipe


class LocalWorkers:
    """`size` processes, each with one PolicyWorker."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def _start(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["tests.unit.policy.megatron_preload"])
        pairs = [context.Pipe() for _ in range(self.size)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [context.Process(target=_serve, args=(theirs,)) for _, theirs in pairs]
        for process, (_, theirs) in zip(self._processes, pairs, strict=True):
            process.start()
            theirs.close()

    def policy(self, recipe: dict) -> Policy:
        """A policy of the recipe, set up; the one before it ends."""
        self.close()
        self._start()
        self._exchange([("create", (recipe, rank, self.size), {}) for rank in range(self.size)], 120)
        policy = Policy(self, Recipe.model_validate(recipe))  # type: ignore[arg-type]
        policy.setup()
        return policy

    def put(self, value: Any) -> Any:
        return value

    def call(
        self,
        method: str,
        *args: Any,
        phase: str,
        timeout_s: float,
        per_worker: Sequence[tuple[Any, ...]] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        own = per_worker or [()] * self.size
        return self._exchange([(method, (*args, *extra), kwargs) for extra in own], min(timeout_s, 120))

    def call_rank(self, rank: int, method: str, *args: Any, phase: str, timeout_s: float, **kwargs: Any) -> Any:
        self._pipes[rank].send((method, args, kwargs))
        return self._receive(rank, min(timeout_s, 120))

    def close(self) -> None:
        """Ends the processes: they stop by themselves when their pipe closes, unless they wait for a peer."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()

    def _exchange(self, messages: Sequence[tuple[str, tuple, dict]], limit: float) -> list[Any]:
        for pipe, message in zip(self._pipes, messages, strict=True):
            pipe.send(message)
        return [self._receive(rank, limit) for rank in range(self.size)]

    def _receive(self, rank: int, limit: float) -> Any:
        if not self._pipes[rank].poll(limit):
            raise TimeoutError(f"rank {rank} did not answer within {limit} s")
        ok, value = self._pipes[rank].recv()
        if ok:
            return value
        if isinstance(value, UserError):
            raise value
        raise RuntimeError(f"rank {rank}: {value}")


def _serve(pipe: Connection) -> None:
    from tests.unit.policy.probe_worker import ProbeWorker

    worker = None
    while True:
        try:
            method, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            if method == "create":
                worker, result = ProbeWorker(*args), None
            else:
                result = getattr(worker, method)(*args, **kwargs)
            pipe.send((True, result))
        except UserError as error:
            pipe.send((False, error))
        except Exception:
            pipe.send((False, traceback.format_exc()))


def make_recipe(model: str, **overrides: Any) -> dict:
    """A recipe for the trainer alone: float32, six-step learning rate, every section that validation asks for.

    Args:
        overrides: dotted keys with `__` for the dot, such as `policy__megatron_cfg__tensor_model_parallel_size=2`.
    """
    recipe: dict[str, Any] = {
        "policy": {
            "model_name": str(model),
            "precision": "float32",
            "train_global_batch_size": 12,
            "train_micro_batch_size": 2,
            "logprob_batch_size": 2,
            "max_total_sequence_length": 48,
            "megatron_cfg": {"optimizer": {"lr": 1e-3, "weight_decay": 0.0}},
            "generation": {"temperature": 0.8},
        },
        "grpo": {"seed": 1},
        "data": {"train": {"dataset_name": "jsonl", "path": "rows.jsonl"}},
        "env": {"math": {"verifier": "math_verify"}},
        "cluster": {"device": "cpu", "gpus_per_node": 1},
    }
    for dotted, value in overrides.items():
        *path, last = dotted.split("__")
        section = recipe
        for key in path:
            section = section.setdefault(key, {})
        section[last] = value
    return recipe


def make_batch(n: int = 12, seed: int = 0, vocab: int = 256, longest: int = 40) -> SequenceBatch:
    """n sequences of 5 to `longest` tokens; the first three tokens of each are its prompt, sample 3 is masked out."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, longest + 1, n)
    total = int(lengths.sum())
    within = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    mask = np.ones(n, dtype=np.float32)
    mask[3 % n] = 0.0 if n > 1 else 1.0
    return SequenceBatch(
        lengths,
        rng.integers(0, vocab, total).astype(np.int32),
        within >= 3,
        {
            "generation_logprobs": rng.normal(-5.5, 0.3, total).astype(np.float32),
            "advantages": np.repeat(rng.normal(size=n), lengths).astype(np.float32),
        },
        {"sample_mask": mask},
    )
