"""Generation workers in a child process: vLLM changes global state of torch that other tests must not see."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import PreTrainedModel

from nemo_rl_moe.generation.interface import Completions, SamplingSpec
from nemo_rl_moe.generation.vllm_worker import VllmWorker
from nemo_rl_moe.refit.digest import weight_digest
from nemo_rl_moe.refit.layout import WeightLayout
from nemo_rl_moe.refit.shared_memory import SharedBuffer
from tests.unit.generation.tiny_qwen import checkpoint_tensors

ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
_CALL_TIMEOUT_S = 180.0
_workers: dict[str, VllmWorker] = {}


def _call(name: str, method: str, args: tuple) -> Any:
    return getattr(_workers[name], method)(*args)


def _create(name: str, recipe: dict) -> None:
    _workers[name] = VllmWorker(recipe, 0)
    _workers[name].setup()


def _set_cpu_workarounds(enabled: bool) -> None:
    from nemo_rl_moe.generation import vllm_compat
    from nemo_rl_moe.refit import host_engine

    real = vllm_compat.cpu_reload_needs_help
    host_engine.cpu_reload_needs_help = real if enabled else lambda device, version: False


def _set_prefix_cache_reset(name: str, enabled: bool) -> None:
    worker = _workers[name]
    if enabled:
        del worker.reset_prefix_cache
    else:
        worker.reset_prefix_cache = lambda: None


def _set_real_sleep(enabled: bool) -> None:
    from nemo_rl_moe.generation import vllm_compat, vllm_worker

    vllm_worker.gives_memory_back = (lambda recipe: True) if enabled else vllm_compat.gives_memory_back


def _set_cache_salt(name: str, enabled: bool) -> None:
    worker = _workers[name]
    if enabled:
        del worker._cache_salt
    else:
        worker._cache_salt = lambda: "one for all"


class EngineProcess:
    """One child process that holds generation workers by name."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        with patch.dict(os.environ, ENVIRONMENT):
            self._pool.submit(os.getpid).result(timeout=_CALL_TIMEOUT_S)

    def create(self, name: str, recipe: dict) -> None:
        """Starts an engine."""
        self._pool.submit(_create, name, recipe).result(timeout=_CALL_TIMEOUT_S)

    def call(self, name: str, method: str, *args: Any) -> Any:
        """Calls a method of a worker."""
        return self._pool.submit(_call, name, method, args).result(timeout=_CALL_TIMEOUT_S)

    def set_cpu_workarounds(self, enabled: bool) -> None:
        """Switches the workarounds for reloads on CPU, in all engines of the process."""
        self._pool.submit(_set_cpu_workarounds, enabled).result(timeout=_CALL_TIMEOUT_S)

    def set_prefix_cache_reset(self, name: str, enabled: bool) -> None:
        """Switches the reset of a worker's prefix cache after its updates."""
        self._pool.submit(_set_prefix_cache_reset, name, enabled).result(timeout=_CALL_TIMEOUT_S)

    def set_real_sleep(self, enabled: bool) -> None:
        """Switches vLLM's own sleep and wake-up on a CPU, where its worker frees nothing, in all engines."""
        self._pool.submit(_set_real_sleep, enabled).result(timeout=_CALL_TIMEOUT_S)

    def set_cache_salt(self, name: str, enabled: bool) -> None:
        """Switches the salt by which cached prefixes of different versions are told apart."""
        self._pool.submit(_set_cache_salt, name, enabled).result(timeout=_CALL_TIMEOUT_S)

    def close(self) -> None:
        """Ends the process."""
        # Tearing down some twenty engines in order takes half a minute and nothing of it is tested.
        self._pool.submit(os._exit, 0)
        self._pool.shutdown()


class Engine:
    """One worker of an `EngineProcess`, called with lists of token ids."""

    def __init__(self, process: EngineProcess, name: str, recipe: dict) -> None:
        self.process = process
        self.name = name
        process.create(name, recipe)

    def generate(self, prompts: list[list[int]], spec: SamplingSpec, ids: list[int] | None = None) -> Completions:
        """Samples; prompt ids are 0, 1, ... unless given."""
        lengths = np.array([len(p) for p in prompts], dtype=np.int64)
        tokens = np.array([t for p in prompts for t in p], dtype=np.int32)
        numbers = np.array(ids if ids is not None else range(len(prompts)), dtype=np.int64)
        return self.process.call(self.name, "generate", numbers, lengths, tokens, spec)

    def version(self) -> int:
        """Present weight version."""
        return self.process.call(self.name, "weight_version")

    def refit(
        self, model: PreTrainedModel, version: int | None = None, tensors: dict[str, torch.Tensor] | None = None
    ) -> int:
        """Hands over the model's weights (or the given tensors) as the next version or the given one; returns it."""
        tensors = checkpoint_tensors(model) if tensors is None else tensors
        layout = WeightLayout.build((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
        wanted = self.version() + 1 if version is None else version
        with SharedBuffer.create(layout.nbytes) as buffer:
            for name, view in layout.views(buffer.tensor).items():
                view.copy_(tensors[name])
            digest = weight_digest(layout.views(buffer.tensor), wanted)
            self.update(str(buffer.path), layout.to_plain(), digest, wanted)
        return wanted

    def update(self, path: str, layout: list, digest: dict[str, str], version: int) -> None:
        """The worker's `update_weights` as it is."""
        update = {"layout": layout, "digest": digest, "path": path}
        self.process.call(self.name, "update_weights", update, version)
