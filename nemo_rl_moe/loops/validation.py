"""Validation: every prompt once, none dropped."""

from __future__ import annotations

import numpy as np

from nemo_rl_moe.generation.interface import SamplingSpec
from nemo_rl_moe.loops.components import Run
from nemo_rl_moe.loops.rollout import Rollouts, generate_and_score


def validate_if_due(run: Run, step: int) -> dict[str, float]:
    """Validates at every `val_period`-th step, and at the last one with `val_at_end`."""
    cfg = run.recipe.grpo
    periodic = cfg.val_period > 0 and step % cfg.val_period == 0
    due = periodic or (cfg.val_at_end and step == cfg.max_num_steps)
    return validate(run) if due else {}


def validate_at_start(run: Run) -> None:
    """Validates the untrained policy and logs it as step 0."""
    if metrics := validate(run):
        run.tracker.log(0, metrics)


def validate_at_end(run: Run, step: int) -> dict[str, float]:
    """Validates after an early end with `val_at_end`, unless that step has been validated, also before a resume."""
    cfg = run.recipe.grpo
    done = "validation/accuracy" in run.tracker.logged(step)
    return validate(run) if cfg.val_at_end and not done else {}


def validate(run: Run) -> dict[str, float]:
    """Scores one response to each validation prompt; nothing without validation data.

    The last batch may be smaller: dropping it would move the accuracy in larger steps than its samples allow.
    """
    cfg, generation = run.recipe.grpo, run.recipe.policy.generation
    prompts = run.data.validation_prompts[: cfg.max_val_samples]
    if not prompts:
        return {}
    spec = SamplingSpec(generation.val_temperature, generation.max_new_tokens, n=1, seed=cfg.seed)
    with run.timer.timed("validation"):
        parts = [
            generate_and_score(run, prompts[i : i + cfg.val_batch_size], spec)
            for i in range(0, len(prompts), cfg.val_batch_size)
        ]
    return validation_metrics(Rollouts.concat(parts, {}))


def validation_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Metrics of scored responses, one to a prompt, under `validation/`; accuracy also for each environment."""
    rewards = rollouts.batch.sample_values["rewards"]
    names = np.array([prompt.env_name for prompt in rollouts.prompts])
    values = {"accuracy": float(rewards.mean(dtype=np.float64)), "num_samples": float(len(rewards))}
    values |= {f"accuracy/{name}": float(rewards[names == name].mean(dtype=np.float64)) for name in np.unique(names)}
    return {f"validation/{name}": value for name, value in (values | rollouts.counts).items()}
