"""Prompts -> sampled responses -> rewards -> one ragged batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nemo_rl_moe.batch import SequenceBatch
from nemo_rl_moe.data.prompt import Prompt
from nemo_rl_moe.environments.base import ScoreRequest
from nemo_rl_moe.generation.interface import Completions, SamplingSpec
from nemo_rl_moe.loops.assemble import assemble
from nemo_rl_moe.loops.components import Run


@dataclass
class Rollouts:
    """Scored responses of P prompts, n each, prompt by prompt.

    Attributes:
        prompts: the P prompts.
        batch: the P x n samples; `prompt_ids` of row i is i // n.
        responses: decoded responses, one for each row.
        counts: what is to be logged of the sampling, such as verifier errors.
    """

    prompts: list[Prompt]
    batch: SequenceBatch
    responses: list[str]
    counts: dict[str, float]

    @property
    def response_lengths(self) -> NDArray[np.int64]:
        """int64 [N], sampled tokens of each row."""
        return np.add.reduceat(self.batch.token_mask.astype(np.int64), self.batch.offsets[:-1])

    def select(self, rows: NDArray[np.int64]) -> Rollouts:
        """The given rows, which must be whole groups in order."""
        groups = self.batch.sample_values["prompt_ids"][rows]
        kept, renumbered = np.unique(groups, return_inverse=True)
        batch = self.batch.select(rows).with_values(samples={"prompt_ids": renumbered.astype(np.int64)})
        return Rollouts([self.prompts[g] for g in kept], batch, [self.responses[r] for r in rows], self.counts)

    @staticmethod
    def concat(parts: Sequence[Rollouts], counts: dict[str, float]) -> Rollouts:
        """All groups of the parts, numbered anew; their counts are added up beside the given ones."""
        batches, first = [], 0
        for part in parts:
            ids = part.batch.sample_values["prompt_ids"] + first
            batches.append(part.batch.with_values(samples={"prompt_ids": ids}))
            first += len(part.prompts)
        total = {name: sum(part.counts[name] for part in parts) for name in parts[0].counts}
        return Rollouts(
            [p for part in parts for p in part.prompts],
            SequenceBatch.concat(batches),
            [r for part in parts for r in part.responses],
            {**total, **counts},
        )


def sampling_spec(run: Run, step: int, generation_batch: int = 0) -> SamplingSpec:
    """Training draws of a step, a function of run seed, step and generation batch, so that a resumed run repeats them.

    A prompt that comes back in a later generation batch of the step (an epoch ended in between) needs new draws.
    """
    grpo, generation = run.recipe.grpo, run.recipe.policy.generation
    return SamplingSpec(
        temperature=generation.temperature,
        max_new_tokens=generation.max_new_tokens,
        n=grpo.num_generations_per_prompt,
        seed=(grpo.seed * 1_000_003 + step) * 1_009 + generation_batch,
    )


def generate_and_score(run: Run, prompts: list[Prompt], spec: SamplingSpec) -> Rollouts:
    """Samples `spec.n` responses for each prompt and scores them in their environments."""
    with run.timer.phase("generation"):
        completions = run.generator.generate(prompts, spec)
    return score(run, prompts, completions, spec.n)


def score(run: Run, prompts: list[Prompt], completions: Completions, n: int) -> Rollouts:
    """Puts prompts and their n responses each together and scores them in their environments."""
    with run.timer.phase("data"):
        batch = assemble(prompts, completions, n)
    with run.timer.phase("reward"):
        scores = run.verifiers.score(
            [
                ScoreRequest(p.env_name, p.id, p.text, response, p.metadata)
                for p, response in zip((p for p in prompts for _ in range(n)), completions.texts, strict=True)
            ]
        )
    for message in scores.messages:
        run.tracker.event(f"warning: {message}")
    counts = {"reward_errors": float(scores.errors), "reward_timeouts": float(scores.timeouts)}
    return Rollouts(prompts, batch.with_values(samples={"rewards": scores.rewards}), completions.texts, counts)
