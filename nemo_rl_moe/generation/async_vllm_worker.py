"""One vLLM `AsyncLLM`: many calls in flight, and weight updates between two of its steps.

A class of coroutines; `cluster.WorkerGroup` hosts it in a Ray actor, tests use it in an event loop of their own. The
engine itself is a process of its own that ends with this one.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nemo_rl_moe.generation.engine_worker import EngineWorker, Requests, to_completions
from nemo_rl_moe.generation.interface import Completions, SamplingSpec
from nemo_rl_moe.generation.token_versions import Span, TokenVersions
from nemo_rl_moe.generation.vllm_compat import (
    build_async_llm,
    finish_weight_update,
    gives_memory_back,
    sampled_tokens,
    weight_spans,
)

PauseMode = Literal["keep", "wait", "abort"]


class AsyncVllmWorker(EngineWorker):
    """A generation worker on `AsyncLLM`.

    What an update does with requests that are running is the recipe's choice (`grpo.async_grpo`): they stay and go on
    with the new weights (in flight), are waited for, or are ended and started again.

    Args:
        recipe: the resolved recipe as plain data.
        index: which generation worker this is.
    """

    def __init__(self, recipe: dict[str, Any], index: int) -> None:
        super().__init__(recipe, index)
        self._engine: Any = None
        self._numbers = itertools.count()
        self._token_versions = TokenVersions()
        # Requests enter one call at a time and never during an update: the salt of their prompts says which weights
        # they begin with.
        self._door = asyncio.Lock()

    async def setup(self) -> dict[str, float]:
        """Builds the engine with the weights of `policy.model_name`, which are version 0.

        Returns:
            `seconds` it took.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        started = time.perf_counter()
        self._engine = build_async_llm(self._recipe, self._index)
        await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=self._refit_init_info()))
        return {"seconds": time.perf_counter() - started}

    async def generate(
        self,
        prompt_ids: NDArray[np.int64],
        prompt_lengths: NDArray[np.int64],
        prompt_tokens: NDArray[np.int32],
        spec: SamplingSpec,
        first_samples: NDArray[np.int64] | None = None,
        together: bool = True,
    ) -> Completions:
        """Samples `spec.n` responses for each prompt; see `VllmWorker.generate`.

        Args:
            together: hold the engine until it has all requests, so that it batches them as `vllm.LLM` does and gives
                the same bits. Off lets each begin at once.

        Raises:
            UserError: a prompt is empty or leaves no room for a response.
            EngineUnusable: sampling or an update failed, now or before.
        """
        while True:
            self._check_usable()
            async with self._door:
                self._sleep.check_ready_to_sample()
                requests = self._requests(prompt_ids, prompt_lengths, prompt_tokens, spec, first_samples)
                with self._fatal("generation"):
                    waiting = await (self._admit_together(requests) if together else self._admit(requests))
            with self._fatal("generation"):
                outputs = await asyncio.gather(*(_finished(queue) for queue in waiting))
                versions = [self._versions_of(queue, out) for queue, out in zip(waiting, outputs, strict=True)]
            # Whatever came out while an update failed is of unknown weights.
            self._check_usable()
            if not any(output.finish_reason == "abort" for output in outputs):
                return to_completions(outputs, versions, self._decode)

    async def update_weights(self, update: dict[str, Any], version: int) -> dict[str, float]:
        """Takes the weights that are offered and makes them the given version; see `VllmWorker.update_weights`.

        Raises:
            EngineUnusable: it failed, now or before; the message names the phase. Running requests are ended.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        ahead = self._recipe.grpo.async_grpo
        mode: PauseMode = "keep" if ahead.in_flight_weight_updates else ahead.running_requests
        # Kept requests lose their keys and values only where the recipe says so; vLLM then computes them anew.
        clear = mode != "keep" or ahead.recompute_kv_cache_after_weight_updates
        started = time.perf_counter()
        async with self._door:
            self._check_usable()
            self._sleep.check_ready_for_update()
            self._check_next_version(version)
            what = f"weight update to version {version}"
            try:
                with self._fatal(f"{what}: pause ({mode})"):
                    await self._engine.pause_generation(mode=mode, clear_cache=clear)
                with self._fatal(f"{what}: start_weight_update"):
                    await self._engine.start_weight_update()
                with self._fatal(f"{what}: update_weights"):
                    await self._engine.update_weights(WeightTransferUpdateRequest(update_info=update))
                with self._fatal(f"{what}: finish_weight_update"):
                    await finish_weight_update(self._engine, version)
                self._token_versions.update(sampled_tokens(self._engine), version)
                self._version = version
                self._sleep.updated()
            finally:
                await self._resume()
        return {"seconds": time.perf_counter() - started}

    async def sleep(self) -> None:
        """See `VllmWorker.sleep`. Requests must not be running."""
        async with self._door:
            self._check_usable()
            if self._sleep.fall_asleep() and gives_memory_back(self._recipe):
                with self._fatal("sleep"):
                    await self._engine.sleep(level=2)

    async def wake(self, tags: list[str] | None = None) -> None:
        """See `VllmWorker.wake`."""
        async with self._door:
            self._check_usable()
            if (woken := self._sleep.wake(tags)) and gives_memory_back(self._recipe):
                with self._fatal(f"waking of {' and '.join(woken)}"):
                    await self._engine.wake_up(woken)

    def shutdown(self) -> None:
        """Ends the engine's process. May be called twice."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None

    async def _admit(self, requests: Requests) -> list[Any]:
        """Gives the requests to the engine. Returns the queue of each."""
        queues = []
        for prompt, parameters in zip(requests.prompts, requests.parameters, strict=True):
            queues.append(await self._engine.add_request(f"{next(self._numbers)}", prompt, parameters))
            self._token_versions.begin(id(queues[-1]), self._version)
        return queues

    async def _admit_together(self, requests: Requests) -> list[Any]:
        await self._engine.pause_generation(mode="keep", clear_cache=False)
        try:
            return await self._admit(requests)
        finally:
            await self._engine.resume_generation()

    def _versions_of(self, queue: Any, output: Any) -> list[Span]:
        """Which version sampled which tokens: the engine's word, or our own count where it says nothing."""
        counted = self._token_versions.end(id(queue), len(output.token_ids))
        return weight_spans(output) or counted

    async def _resume(self) -> None:
        """Goes on after an update, in any case; with an engine that it made unusable the running requests end first."""
        if self._engine.errored:
            return
        if self._failure is not None:
            await self._engine.pause_generation(mode="abort", clear_cache=False)
        await self._engine.resume_generation()

    def _max_model_len(self) -> int:
        return self._engine.model_config.max_model_len


async def _finished(queue: Any) -> Any:
    """The finished output of a request that reports only its end."""
    return (await queue.get()).outputs[0]
