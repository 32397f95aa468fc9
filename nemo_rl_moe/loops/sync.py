"""Sync placement: trainer and generator take turns on the same devices; every sample is from the current weights."""

from __future__ import annotations

from nemo_rl_moe.loops import validation
from nemo_rl_moe.loops.components import Run
from nemo_rl_moe.loops.report import end_early, finish_step
from nemo_rl_moe.loops.step import give_devices_to_trainer, refit, sample_batch, train_on


def train(run: Run) -> None:
    """Runs the recipe's steps: refit, sample, score, train, and now and then validate and save."""
    refit(run)
    if run.recipe.grpo.val_at_start and run.start_step == 1:
        validation.validate_at_start(run)
    run.timer.start()
    for step in range(run.start_step, run.recipe.grpo.max_num_steps + 1):
        rollouts = sample_batch(run, step)
        if rollouts is None:
            end_early(run, step - 1)
            break
        give_devices_to_trainer(run)
        metrics = train_on(run, rollouts)
        refit(run)
        metrics |= validation.validate_if_due(run, step)
        finish_step(run, step, rollouts, metrics)
