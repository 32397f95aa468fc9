"""Trainer and generation workers that answer at once with arrays of the right size: what is left is the controller.

Named so that nobody takes their numbers for a model's: nothing is sampled and nothing learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nemo_rl_moe.batch import FloatArray
from nemo_rl_moe.generation.interface import Completions, SamplingSpec
from nemo_rl_moe.policy.packing import RankShard
from nemo_rl_moe.policy.step_shard import StepShard
from nemo_rl_moe.policy.worker import MEMORY_PEAK, RankPlace
from nemo_rl_moe.recipe.schema import Recipe

_FIRST_WORD = 200


class FakePolicyWorker:
    """Has the interface of `PolicyWorker`."""

    def __init__(self, recipe: dict, rank: int, world_size: int) -> None:
        megatron = Recipe.model_validate(recipe).policy.megatron_cfg
        ranks = megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size
        self._place = RankPlace(rank // ranks, rank % ranks == 0)

    def open_store(self) -> tuple[str, int]:
        return "127.0.0.1", 0

    def setup(self, host: str, port: int) -> RankPlace:
        return self._place

    def logprobs(self, shard: RankShard, reference: bool = False) -> FloatArray | None:
        return np.full(len(shard.batch.tokens), -1.0, dtype=np.float32) if self._place.reports else None

    def train(self, steps: Sequence[StepShard]) -> dict[str, float]:
        slots = sum(m.rows * m.row_length for step in steps for m in step.shard.microbatches)
        return {"token_mult_prob_error": 1.0, "loss": 0.0, "num_slots": float(slots), MEMORY_PEAK: 0.0}

    def weight_specs(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return [("weight", "float32", (1,))]

    def export_weights(self, buffer_path: str) -> int:
        return int(self._place == RankPlace(0, True))


class FakeGenerationWorker:
    """Has the interface of `AsyncVllmWorker`: every response has the most tokens that it may have."""

    def __init__(self, recipe: dict[str, Any], index: int) -> None:
        self._version = 0

    def setup(self) -> dict[str, float]:
        return {"seconds": 0.0}

    def generate(
        self,
        prompt_ids: np.ndarray,
        prompt_lengths: np.ndarray,
        prompt_tokens: np.ndarray,
        spec: SamplingSpec,
        first_samples: np.ndarray | None = None,
        together: bool = True,
    ) -> Completions:
        count = len(prompt_ids) * spec.n
        total = count * spec.max_new_tokens
        words = np.random.default_rng(0).integers(_FIRST_WORD, _FIRST_WORD + 200, spec.max_new_tokens, dtype=np.int32)
        return Completions(
            lengths=np.full(count, spec.max_new_tokens, dtype=np.int64),
            token_ids=np.tile(words, count),
            logprobs=np.full(total, -1.0, dtype=np.float32),
            truncated=np.zeros(count, dtype=np.bool_),
            token_versions=np.full(total, self._version, dtype=np.int32),
            texts=["word " * spec.max_new_tokens] * count,
        )

    def update_weights(self, update: dict[str, Any], version: int) -> dict[str, float]:
        self._version = version
        return {"seconds": 0.0}

    def weight_version(self) -> int:
        return self._version
