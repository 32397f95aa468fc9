"""One vLLM engine: samples token ids with their log-probabilities, and takes new weights.

A plain class; `cluster.WorkerGroup` hosts it in a Ray actor, tests use it directly.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_rl_moe.generation.engine_worker import EngineWorker, to_completions
from nemo_rl_moe.generation.interface import Completions, SamplingSpec
from nemo_rl_moe.generation.vllm_compat import build_llm, finish_weight_update, gives_memory_back


class VllmWorker(EngineWorker):
    """A generation worker on `vllm.LLM`: one call at a time.

    Args:
        recipe: the resolved recipe as plain data.
        index: which generation worker this is.
    """

    def __init__(self, recipe: dict[str, Any], index: int) -> None:
        super().__init__(recipe, index)
        self._llm: Any = None

    def setup(self) -> dict[str, float]:
        """Builds the engine with the weights of `policy.model_name`, which are version 0.

        Returns:
            `seconds` it took.
        """
        started = time.perf_counter()
        self._llm = build_llm(self._recipe, self._index)
        self._llm.init_weight_transfer_engine({"init_info": self._refit_init_info()})
        return {"seconds": time.perf_counter() - started}

    def generate(
        self,
        prompt_ids: NDArray[np.int64],
        prompt_lengths: NDArray[np.int64],
        prompt_tokens: NDArray[np.int32],
        spec: SamplingSpec,
        first_samples: NDArray[np.int64] | None = None,
    ) -> Completions:
        """Samples `spec.n` responses for each prompt.

        Args:
            prompt_ids: int64 [P].
            prompt_lengths: int64 [P].
            prompt_tokens: int32 [sum(prompt_lengths)].
            spec: how to sample.
            first_samples: int64 [P], number of each prompt's first response for the seeds; None is 0 for all. A prompt
                that comes twice in one step needs other draws the second time.

        Raises:
            UserError: a prompt is empty or leaves no room for a response.
            EngineUnusable: sampling failed, or an earlier call did.
            RuntimeError: the engine is asleep, or has not got weights since.
        """
        self._check_usable()
        self._sleep.check_ready_to_sample()
        requests = self._requests(prompt_ids, prompt_lengths, prompt_tokens, spec, first_samples)
        if not requests.prompts:
            return to_completions([], [], self._decode)
        with self._fatal("generation"), _collector_paused():
            answers = self._llm.generate(requests.prompts, requests.parameters, use_tqdm=False)
        outputs = [answer.outputs[0] for answer in answers]
        # Calls and updates take turns here.
        return to_completions(outputs, [[(self._version, len(o.token_ids))] for o in outputs], self._decode)

    def update_weights(self, update: dict[str, Any], version: int) -> dict[str, float]:
        """Takes the weights that are offered and makes them the given version.

        Args:
            update: what the offer gave for this worker (`WeightOffer.served_to`).
            version: exactly the current version + 1; an engine that still has its checkpoint's weights takes any.

        Returns:
            `seconds` it took.

        Raises:
            EngineUnusable: it failed, now or before; the message names the phase.
        """
        self._check_usable()
        self._sleep.check_ready_for_update()
        self._check_next_version(version)
        started = time.perf_counter()
        with self._fatal(f"weight update to version {version}: start_weight_update"):
            self._llm.start_weight_update()
        with self._fatal(f"weight update to version {version}: update_weights"):
            self._llm.update_weights({"update_info": update})
        with self._fatal(f"weight update to version {version}: finish_weight_update"):
            finish_weight_update(self._llm, version)
        with self._fatal(f"weight update to version {version}: reset_prefix_cache"):
            # Cached keys and values are those of the old weights; vLLM does not drop them by itself.
            self.reset_prefix_cache()
        self._version = version
        self._sleep.updated()
        return {"seconds": time.perf_counter() - started}

    def reset_prefix_cache(self) -> None:
        """Forgets all cached keys and values.

        Raises:
            RuntimeError: vLLM refused, because requests are still running.
        """
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM refused to reset its prefix cache")

    def sleep(self) -> None:
        """Gives the GPU's memory back while the trainer works: weights and cache are dropped (level 2).

        On a CPU no memory is given back, but the engine refuses to sample all the same until it is woken and updated.
        Not run on a GPU yet.
        """
        self._check_usable()
        if self._sleep.fall_asleep() and gives_memory_back(self._recipe):
            with self._fatal("sleep"):
                self._llm.sleep(level=2)

    def wake(self, tags: list[str] | None = None) -> None:
        """Takes memory again: `["weights"]` before a weight update, `["kv_cache"]` after it; None takes both.

        What is awake already stays as it is. Not run on a GPU yet.
        """
        self._check_usable()
        if (woken := self._sleep.wake(tags)) and gives_memory_back(self._recipe):
            with self._fatal(f"waking of {' and '.join(woken)}"):
                self._llm.wake_up(woken)

    def shutdown(self) -> None:
        """Ends the engine, which also unmaps the weight buffer. May be called twice."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None

    def _max_model_len(self) -> int:
        return self._llm.model_config.max_model_len


@contextmanager
def _collector_paused() -> Iterator[None]:
    """vLLM makes many objects for each token and hardly a cycle; looking for some took 3 to 5 % of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
