"""What a step leaves behind: its metrics and a few samples."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_rl_moe.batch import SequenceBatch
from nemo_rl_moe.bench.flops.count import training_flops
from nemo_rl_moe.grpo.sampling import zero_std_fraction
from nemo_rl_moe.loops import checkpointing, validation
from nemo_rl_moe.loops.components import Run
from nemo_rl_moe.loops.rollout import Rollouts
from nemo_rl_moe.tracking.throughput import throughput


def finish_step(run: Run, step: int, rollouts: Rollouts, metrics: dict[str, float]) -> None:
    """Writes the step's samples, its checkpoint when due, and its metrics; ends the step's clock.

    The row comes last, because it has the time of the checkpoint. The checkpoint holds the row as it is known before,
    so that a process killed between the two does not lose it (`checkpointing.resume`).
    """
    run.tracker.rollouts(step, samples(rollouts, run.recipe.logger.num_rollout_samples))
    metrics = rollout_metrics(run, rollouts) | metrics
    row = _row(run, rollouts, metrics, run.timer.so_far())
    try:
        checkpointing.save_if_due(run, step, row)
    except Exception:
        run.tracker.log(step, row)  # it was trained, and no checkpoint will tell of it
        raise
    run.row = _row(run, rollouts, metrics, run.timer.step())
    run.tracker.log(step, run.row)


def _row(run: Run, rollouts: Rollouts, metrics: dict[str, float], timing: dict[str, float]) -> dict[str, float]:
    """All metrics of a step whose time went where `timing` says."""
    lengths, count = rollouts.batch.lengths, run.flops
    rates = throughput(
        int(lengths.sum()),
        timing,
        run.plan.policy_world,
        run.plan.generation_world,
        run.plan.total_devices,
        train_flops=None if count is None else training_flops(count, lengths.tolist()),
    )
    return metrics | timing | rates


def end_early(run: Run, step: int) -> None:
    """The data ended before the last step: does what the last step would have done, so that nothing trained is lost."""
    run.tracker.event(f"the training data ended after {run.recipe.grpo.max_num_epochs} epoch(s), at step {step}")
    if step < 1:
        return
    metrics = validation.validate_at_end(run, step)
    checkpointing.save_at_end(run, step, run.row | metrics)
    if metrics:
        run.tracker.log(step, metrics)


def rollout_metrics(run: Run, rollouts: Rollouts) -> dict[str, float]:
    """Metrics of the sampled batch, under `train/`."""
    values = rollouts.batch.sample_values
    rewards = torch.from_numpy(values["rewards"])
    # The policy has moved on by one version since it was sampled; age counts from the version that was then current.
    age = run.weight_version - 1 - int(values["weight_versions"].min())
    zero_std = zero_std_fraction(rewards, torch.from_numpy(values["prompt_ids"]))
    if (sampled := rollouts.counts.get("dynamic_sampling_groups")) is not None:
        # The equal groups were dropped before this batch was made; the share is of all that were sampled.
        zero_std = rollouts.counts["dynamic_sampling_equal_groups"] / sampled
    named = {
        "reward": float(rewards.mean()),
        "mean_tokens_per_sample": float(rollouts.batch.lengths.mean()),
        "truncated_fraction": float(np.mean(values["truncated"])),
        "zero_std_fraction": zero_std,
        "trajectory_age_max": float(age),
        "weight_version": float(values["weight_versions"].max()),
        "updated_in_flight_fraction": float(np.mean(newest_versions(rollouts.batch) > values["weight_versions"])),
        **rollouts.counts,
    }
    return {f"train/{name}": value for name, value in named.items()}


def newest_versions(batch: SequenceBatch) -> NDArray[np.int64]:
    """int64 [N]: version of the weights that sampled each sample's last token."""
    return batch.token_values["token_versions"][batch.offsets[1:] - 1].astype(np.int64)


def samples(rollouts: Rollouts, count: int) -> list[dict]:
    """The first response of the first prompts, to read."""
    values, n = rollouts.batch.sample_values, len(rollouts.batch) // len(rollouts.prompts)
    return [
        {
            "prompt_id": rollouts.prompts[row // n].id,
            "problem": rollouts.prompts[row // n].text,
            "response": rollouts.responses[row],
            "reward": float(values["rewards"][row]),
            "truncated": bool(values["truncated"][row]),
            "weight_version": int(values["weight_versions"][row]),
            "tokens_by_version": _tokens_by_version(rollouts.batch, row),
        }
        for row in range(0, min(count, len(rollouts.prompts)) * n, n)
    ]


def _tokens_by_version(batch: SequenceBatch, row: int) -> dict[str, int]:
    """How many of the sample's tokens each version sampled, oldest first."""
    start, end = batch.offsets[row : row + 2]
    sampled = batch.token_mask[start:end]
    versions, counts = np.unique(batch.token_values["token_versions"][start:end][sampled], return_counts=True)
    return {str(version): int(count) for version, count in zip(versions, counts, strict=True)}
