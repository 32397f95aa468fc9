"""What every vLLM worker does whichever engine it hosts: checks, requests, seeds, and outputs as flat arrays."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_rl_moe.data.tokenizer import open_tokenizer
from nemo_rl_moe.errors import RunFailed, UserError
from nemo_rl_moe.generation.interface import Completions, SamplingSpec
from nemo_rl_moe.generation.sleep import SleepState
from nemo_rl_moe.generation.token_versions import Span
from nemo_rl_moe.recipe.schema import Recipe
from nemo_rl_moe.refit.checkpoint_shapes import checkpoint_elements


class EngineUnusable(RunFailed):
    """The engine must not sample any more: something failed half-way, so its weights or requests are unknown."""


@dataclass(frozen=True)
class Requests:
    """One request for each response: prompts as vLLM takes them, and the sampling parameters of each."""

    prompts: list[dict[str, Any]]
    parameters: list[Any]


class EngineWorker:
    """The part that the workers of both engines share.

    Args:
        recipe: the resolved recipe as plain data.
        index: which generation worker this is.
    """

    def __init__(self, recipe: dict[str, Any], index: int) -> None:
        self._recipe = Recipe.model_validate(recipe)
        self._index = index
        self._version = 0
        self._failure: str | None = None
        self._sleep = SleepState()
        self._tokenizer: Any = None

    def weight_version(self) -> int:
        """Version of the weights it samples with; 0 are those of the checkpoint it was built from."""
        return self._version

    def _max_model_len(self) -> int:
        """Prompt and response tokens that the engine accepts."""
        raise NotImplementedError

    def _decode(self, rows: list[list[int]]) -> list[str]:
        """Texts of responses without special tokens, by the run's own tokenizer."""
        if self._tokenizer is None:
            self._tokenizer = open_tokenizer(self._recipe.policy)
        return self._tokenizer.batch_decode(rows, skip_special_tokens=True)

    def _refit_init_info(self) -> dict[str, Any]:
        """What vLLM's weight-transfer engine gets at the start."""
        policy = self._recipe.policy
        # With overrides the model may have other shapes than its checkpoint, so there is nothing to compare with.
        return {"expected": {} if policy.hf_config_overrides else checkpoint_elements(policy.model_name)}

    def _requests(
        self,
        prompt_ids: NDArray[np.int64],
        prompt_lengths: NDArray[np.int64],
        prompt_tokens: NDArray[np.int32],
        spec: SamplingSpec,
        first_samples: NDArray[np.int64] | None,
    ) -> Requests:
        """`spec.n` requests for each prompt, in order.

        Raises:
            UserError: a prompt is empty or leaves no room for a response.
            EngineUnusable: vLLM refuses the sampling parameters.
        """
        if len(prompt_ids) == 0:
            return Requests([], [])
        self._check_prompts(prompt_ids, prompt_lengths)
        rows = [row.tolist() for row in np.split(prompt_tokens, np.cumsum(prompt_lengths)[:-1])]
        starts = first_samples if first_samples is not None else np.zeros(len(rows), dtype=np.int64)
        seeds = [
            sample_seed(spec.seed, prompt, start + j)
            for prompt, start in zip(prompt_ids.tolist(), starts.tolist(), strict=True)
            for j in range(spec.n)
        ]
        salt = self._cache_salt()
        prompts = [{"prompt_token_ids": row, "cache_salt": salt} for row in rows for _ in range(spec.n)]
        with self._fatal("generation"):
            return Requests(prompts, self._sampling_params(spec, seeds))

    def _cache_salt(self) -> str:
        # vLLM caches keys and values by prompt and salt. With the version as salt, no request gets those of older
        # weights, even where an update leaves them in place for the requests that are still running.
        return f"weights {self._version}"

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise EngineUnusable(f"generation worker {self._index} is unusable: {self._failure}")

    def _check_next_version(self, version: int) -> None:
        if self._version != 0 and version != self._version + 1:
            raise ValueError(f"weight version {version} after {self._version}, expected {self._version + 1}")

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
        limit = self._max_model_len()
        wrong = np.flatnonzero((lengths == 0) | (lengths >= limit))
        if len(wrong):
            row = wrong[0]
            raise UserError(
                f"prompt {ids[row]} has {lengths[row]} tokens, expected 1 to {limit - 1}: the generator "
                f"takes {limit} tokens of prompt and response "
                "(policy.generation.vllm_cfg.max_model_len, else policy.max_total_sequence_length)"
            )

    def _sampling_params(self, spec: SamplingSpec, seeds: list[int]) -> list[Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

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
            "output_kind": RequestOutputKind.FINAL_ONLY,
        }
        return [SamplingParams(seed=seed, **common) for seed in seeds]


def sample_seed(seed: int, prompt_id: int, sample: int) -> int:
    """A 63-bit seed of (seed, prompt id, number of the response), the same in every process."""
    digest = hashlib.blake2b(f"{seed}/{prompt_id}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def to_completions(
    outputs: list[Any], versions: list[list[Span]], decode: Callable[[list[list[int]]], list[str]]
) -> Completions:
    """vLLM's finished `CompletionOutput`s as flat arrays.

    Args:
        versions: which version sampled which tokens of each output.
        decode: token ids of responses to their texts.
    """
    lengths = np.array([len(o.token_ids) for o in outputs], dtype=np.int64)
    total = int(lengths.sum())
    chain = itertools.chain.from_iterable
    spans = list(chain(versions))
    return Completions(
        lengths=lengths,
        token_ids=np.fromiter(chain(o.token_ids for o in outputs), dtype=np.int32, count=total),
        # With `logprobs=0` vLLM gives one value a position, that of the sampled token.
        logprobs=np.fromiter(chain(o.logprobs.logprobs for o in outputs), dtype=np.float32, count=total),
        truncated=np.array([o.finish_reason == "length" for o in outputs], dtype=np.bool_),
        token_versions=np.repeat(
            np.array([v for v, _ in spans], dtype=np.int32), np.array([n for _, n in spans], dtype=np.int64)
        ),
        texts=decode([list(o.token_ids) for o in outputs]),
    )
