"""Validation: every prompt once, none dropped."""

from __future__ import annotations

import numpy as np

from nemo_rl_moe.generation.interface import SamplingSpec
from nemo_rl_moe.loops.components import Run
from nemo_rl_moe.loops.rollout import generate_and_score


def due(run: Run, step: int) -> bool:
    """Whether the step ends with a validation."""
    cfg = run.recipe.grpo
    if not run.data.validation_prompts:
        return False
    periodic = cfg.val_period > 0 and step % cfg.val_period == 0
    return periodic or (cfg.val_at_end and step == cfg.max_num_steps)


def validate_if_due(run: Run, step: int) -> dict[str, float]:
    """Validates when the recipe says so."""
    return validate(run, step) if due(run, step) else {}


def validate(run: Run, step: int) -> dict[str, float]:
    """Scores one response to each validation prompt and logs it under the step.

    The last batch may be smaller: dropping it would move the accuracy in larger steps than its samples allow.
    """
    cfg, generation = run.recipe.grpo, run.recipe.policy.generation
    prompts = run.data.validation_prompts[: cfg.max_val_samples]
    spec = SamplingSpec(generation.val_temperature, generation.max_new_tokens, n=1, seed=cfg.seed)
    with run.timer.timed("validation"):
        parts = [
            generate_and_score(run, prompts[i : i + cfg.val_batch_size], spec)
            for i in range(0, len(prompts), cfg.val_batch_size)
        ]
    rewards = np.concatenate([part.batch.sample_values["rewards"] for part in parts])
    names = np.array([p.env_name for p in prompts])
    metrics = {"validation/accuracy": float(rewards.mean()), "validation/num_samples": float(len(rewards))}
    if len(set(names)) > 1:
        metrics |= {f"validation/accuracy/{name}": float(rewards[names == name].mean()) for name in sorted(set(names))}
    if step == 0:
        run.tracker.log(0, metrics)
    return metrics
