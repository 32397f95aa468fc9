"""Async-1off placement: the generator runs ahead on its own devices, at most `max_trajectory_age_steps` versions."""

from __future__ import annotations

from nemo_rl_moe.loops import validation
from nemo_rl_moe.loops.collector import TrajectoryCollector
from nemo_rl_moe.loops.components import Run
from nemo_rl_moe.loops.report import end_early, finish_step
from nemo_rl_moe.loops.step import refit, train_on


def train(run: Run) -> None:
    """Runs the recipe's steps: take what was sampled meanwhile, train, refit, and now and then validate and save."""
    refit(run)
    if run.recipe.grpo.val_at_start and run.start_step == 1:
        validation.validate_at_start(run)
    run.timer.start()
    with TrajectoryCollector(run) as collector:
        for step in range(run.start_step, run.recipe.grpo.max_num_steps + 1):
            with run.timer.phase("exposed_generation"):
                rollouts = collector.take()
            if rollouts is None:
                end_early(run, step - 1)
                break
            metrics = train_on(run, rollouts)
            with run.timer.phase("exposed_generation"):
                collector.settle()
            refit(run)
            metrics |= validation.validate_if_due(run, step)
            collector.advance()
            finish_step(run, step, rollouts, metrics)
