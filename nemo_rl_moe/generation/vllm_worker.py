"""One vLLM engine: samples token ids with their log-probabilities, and takes new weights.

A plain class; `cluster.WorkerGroup` hosts it in a Ray actor, tests use it directly.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_rl_moe.errors import UserError
from nemo_rl_moe.generation.interface import Completions, SamplingSpec
from nemo_rl_moe.generation.vllm_compat import build_llm
from nemo_rl_moe.recipe.schema import Recipe
from nemo_rl_moe.refit.checkpoint_shapes import checkpoint_elements


class EngineUnusable(RuntimeError):
    """The engine must not sample any more: something failed half-way, so its weights or requests are unknown."""


class VllmWorker:
    """A generation worker.

    Args:
        recipe: the resolved recipe as plain data.
        index: which generation worker this is.
    """

    def __init__(self, recipe: dict[str, Any], index: int) -> None:
        self._recipe = Recipe.model_validate(recipe)
        self._index = index
        self._llm: Any = None
        self._version = 0
        self._failure: str | None = None

    def setup(self) -> dict[str, float]:
        """Builds the engine with the weights of `policy.model_name`, which are version 0.

        Returns:
            `seconds` it took.
        """
        started = time.perf_counter()
        self._llm = build_llm(self._recipe, self._index)
        policy = self._recipe.policy
        # With overrides the model may have other shapes than its checkpoint, so there is nothing to compare with.
        expected = {} if policy.hf_config_overrides else checkpoint_elements(policy.model_name)
        self._llm.init_weight_transfer_engine({"init_info": {"expected": expected}})
        return {"seconds": time.perf_counter() - started}

    @property
    def max_model_len(self) -> int:
        """Prompt and response tokens that the engine accepts."""
        return self._llm.model_config.max_model_len

    def weight_version(self) -> int:
        """Version of the weights it samples with; 0 are those of the checkpoint it was built from."""
        return self._version

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
        """
        self._check_usable()
        prompts = [row.tolist() for row in np.split(prompt_tokens, np.cumsum(prompt_lengths)[:-1])]
        if len(prompt_ids) == 0:
            return _to_completions([], self._version)
        self._check_prompts(prompt_ids, prompt_lengths)
        starts = first_samples if first_samples is not None else np.zeros(len(prompts), dtype=np.int64)
        seeds = [
            sample_seed(spec.seed, prompt, start + j)
            for prompt, start in zip(prompt_ids.tolist(), starts.tolist(), strict=True)
            for j in range(spec.n)
        ]
        requests = [{"prompt_token_ids": tokens} for tokens in prompts for _ in range(spec.n)]
        with self._fatal("generation"), _collector_paused():
            outputs = self._llm.generate(requests, self._sampling_params(spec, seeds), use_tqdm=False)
        return _to_completions([output.outputs[0] for output in outputs], self._version)

    def update_weights(self, path: str, layout: list, digest: str, version: int) -> dict[str, float]:
        """Loads the weights in a shared buffer and makes them the given version.

        Args:
            path: file of the buffer.
            layout: `WeightLayout.to_plain()`.
            digest: `weight_digest` of the sender.
            version: exactly the current version + 1; an engine that still has its checkpoint's weights takes any.

        Returns:
            `seconds` it took.

        Raises:
            EngineUnusable: it failed, now or before; the message names the phase.
        """
        self._check_usable()
        if self._version != 0 and version != self._version + 1:
            raise ValueError(f"weight version {version} after {self._version}, expected {self._version + 1}")
        started = time.perf_counter()
        with self._fatal(f"weight update to version {version}: start_weight_update"):
            self._llm.start_weight_update()
        with self._fatal(f"weight update to version {version}: update_weights"):
            self._llm.update_weights({"update_info": {"path": path, "layout": layout, "digest": digest}})
        with self._fatal(f"weight update to version {version}: finish_weight_update"):
            self._llm.finish_weight_update()
        with self._fatal(f"weight update to version {version}: reset_prefix_cache"):
            # Cached keys and values are those of the old weights; vLLM does not drop them by itself.
            self.reset_prefix_cache()
        self._version = version
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

        On a CPU nothing is released and nothing happens. Not run on a GPU yet.
        """
        if self._recipe.cluster.device != "cpu":
            self._llm.sleep(level=2)

    def wake(self, tags: list[str] | None = None) -> None:
        """Takes the memory again: `["weights"]` before a weight update, `["kv_cache"]` after it; None takes both.

        On a CPU nothing happens. Not run on a GPU yet.
        """
        if self._recipe.cluster.device != "cpu":
            self._llm.wake_up(tags)

    def shutdown(self) -> None:
        """Ends the engine, which also unmaps the weight buffer. May be called twice."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise EngineUnusable(f"generation worker {self._index} is unusable: {self._failure}")

    @contextmanager
    def _fatal(self, phase: str) -> Iterator[None]:
        """Whatever fails inside makes the engine unusable.

        Half-loaded weights would give plausible text and wrong log-probabilities, and requests left over from a broken
        call would come back as answers of the next: there is no way back from either.
        """
        try:
            yield
        except BaseException as error:
            self._failure = f"{phase} failed: {error}"
            if not isinstance(error, Exception):
                raise
            raise EngineUnusable(f"generation worker {self._index} is unusable: {self._failure}") from error

    def _check_prompts(self, ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        wrong = np.flatnonzero((lengths == 0) | (lengths >= self.max_model_len))
        if len(wrong):
            row = wrong[0]
            raise UserError(
                f"prompt {ids[row]} has {lengths[row]} tokens, expected 1 to {self.max_model_len - 1}: the generator "
                f"takes {self.max_model_len} tokens of prompt and response "
                "(policy.generation.vllm_cfg.max_model_len, else policy.max_total_sequence_length)"
            )

    def _sampling_params(self, spec: SamplingSpec, seeds: list[int]) -> list[Any]:
        from vllm import SamplingParams

        generation = self._recipe.policy.generation
        common: dict[str, Any] = {
            "temperature": spec.temperature,
            "max_tokens": spec.max_new_tokens,
            "logprobs": 0,
            # One list of floats for each response instead of a dict and an object for each token.
            "flat_logprobs": True,
            "stop_token_ids": generation.stop_token_ids,
            "stop": generation.stop_strings,
            # Only a search for stop strings needs text.
            "detokenize": bool(generation.stop_strings),
            # Each request has its own object, so vLLM need not copy it deeply.
            "skip_clone": True,
        }
        return [SamplingParams(seed=seed, **common) for seed in seeds]


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


def sample_seed(seed: int, prompt_id: int, sample: int) -> int:
    """A 63-bit seed of (seed, prompt id, number of the response), the same in every process."""
    digest = hashlib.blake2b(f"{seed}/{prompt_id}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _to_completions(outputs: list[Any], version: int) -> Completions:
    lengths = np.array([len(o.token_ids) for o in outputs], dtype=np.int64)
    total = int(lengths.sum())
    chain = itertools.chain.from_iterable
    return Completions(
        lengths=lengths,
        token_ids=np.fromiter(chain(o.token_ids for o in outputs), dtype=np.int32, count=total),
        # With `logprobs=0` vLLM gives one value a position, that of the sampled token.
        logprobs=np.fromiter(chain(o.logprobs.logprobs for o in outputs), dtype=np.float32, count=total),
        truncated=np.array([o.finish_reason == "length" for o in outputs], dtype=np.bool_),
        weight_versions=np.full(len(outputs), version, dtype=np.int64),
    )
