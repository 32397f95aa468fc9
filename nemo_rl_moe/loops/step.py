"""One GRPO step, shared by both placements: sample, score, log-probabilities, advantages, update, refit."""

from __future__ import annotations

import numpy as np
import torch

from nemo_rl_moe.batch import ROUTED_EXPERTS, SequenceBatch
from nemo_rl_moe.generation.sleep import KV_CACHE, WEIGHTS
from nemo_rl_moe.grpo.advantages import clip_advantages, group_advantages
from nemo_rl_moe.grpo.importance import sequence_error_mask
from nemo_rl_moe.grpo.rewards import overlong_penalty, scale_rewards
from nemo_rl_moe.grpo.sampling import DynamicSampler, overlong_mask, why_no_gradient
from nemo_rl_moe.loops.components import Run
from nemo_rl_moe.loops.rollout import Rollouts, generate_and_score, sampling_spec


def refit(run: Run) -> None:
    """Brings the generator to the trainer's weights and version.

    A colocated generator is woken for it, in two parts: the trainer needs its memory until the weights are handed over,
    and only then is there room for the key/value cache.
    """
    with run.timer.phase("weight_sync"):
        if run.plan.colocated:
            run.generator.wake([WEIGHTS])
        run.synchronizer.sync(run.weight_version)
        if run.plan.colocated:
            run.generator.wake([KV_CACHE])


def give_devices_to_trainer(run: Run) -> None:
    """Puts a colocated generator to sleep until the next refit, so that the trainer has its memory."""
    if run.plan.colocated:
        with run.timer.phase("weight_sync"):
            run.generator.sleep()


def sample_batch(run: Run, step: int) -> Rollouts | None:
    """Samples the step's groups; None when the data has ended.

    With dynamic sampling, groups whose rewards are all equal are dropped whole and further prompts are sampled.
    """
    cfg = run.recipe.grpo
    sampler = DynamicSampler(cfg.num_prompts_per_step, cfg.dynamic_sampling_max_gen_batches)
    parts: list[Rollouts] = []
    while not sampler.done:
        with run.timer.phase("data"):
            prompts = next(run.data.loader, None)
        if prompts is None:
            return None
        run.data_state = run.data.loader.state_dict()
        rollouts = generate_and_score(run, prompts, sampling_spec(run, step, sampler.batches))
        if not cfg.use_dynamic_sampling:
            return rollouts
        values = rollouts.batch.sample_values
        keep = sampler.add(torch.from_numpy(values["rewards"]), torch.from_numpy(values["prompt_ids"]))
        parts.append(rollouts.select(keep.numpy()))
    return Rollouts.concat(parts, sampler.metrics())


def train_on(run: Run, rollouts: Rollouts) -> dict[str, float]:
    """Log-probabilities, advantages and the update. Returns the trainer's metrics under `train/`."""
    batch = with_advantages(run, rollouts)
    with run.timer.phase("policy_and_reference_logprobs"):
        batch = with_logprobs(run, batch)
    _warn_without_gradient(run, batch)
    with run.timer.phase("policy_training"):
        metrics = run.policy.train(batch)
    run.weight_version += 1
    if (warning := run.health.observe(metrics["token_mult_prob_error"])) is not None:
        run.tracker.event(f"warning: {warning}")
    return {name if "/" in name else f"train/{name}": value for name, value in metrics.items()}


def _warn_without_gradient(run: Run, batch: SequenceBatch) -> None:
    """A batch that cannot move the policy is not an error, but nobody should have to guess why nothing is learned."""
    values = batch.sample_values
    first_tokens = torch.from_numpy(batch.token_values["advantages"][batch.offsets[:-1]])
    why = why_no_gradient(first_tokens, torch.from_numpy(values["sample_mask"]), torch.from_numpy(values["truncated"]))
    if (warning := run.health.no_gradient(why)) is not None:
        run.tracker.event(f"warning: {warning}")


def with_advantages(run: Run, rollouts: Rollouts) -> SequenceBatch:
    """Shapes the rewards and turns them into one advantage for each token of a sample."""
    cfg, batch = run.recipe.grpo, rollouts.batch
    rewards = torch.from_numpy(batch.sample_values["rewards"])
    truncated = torch.from_numpy(batch.sample_values["truncated"])
    if cfg.reward_scaling.enabled:
        s = cfg.reward_scaling
        rewards = scale_rewards(rewards, s.source_min, s.source_max, s.target_min, s.target_max)
    if cfg.reward_shaping.enabled:
        shaping = cfg.reward_shaping
        limit = shaping.max_response_length or run.recipe.policy.generation.max_new_tokens
        lengths = torch.from_numpy(rollouts.response_lengths)
        rewards = rewards + overlong_penalty(
            lengths, limit, shaping.overlong_buffer_length, shaping.overlong_buffer_penalty
        )
    advantages = group_advantages(
        rewards,
        torch.from_numpy(batch.sample_values["prompt_ids"]),
        leave_one_out=cfg.use_leave_one_out_baseline,
        normalize=cfg.normalize_rewards,
    )
    advantages = clip_advantages(advantages, cfg.advantage_clip_low, cfg.advantage_clip_high)
    mask = overlong_mask(truncated) if cfg.overlong_filtering else torch.ones(len(batch))
    return batch.with_values(
        tokens={"advantages": np.repeat(advantages.numpy(), batch.lengths).astype(np.float32)},
        samples={"sample_mask": mask.numpy().astype(np.float32)},
    )


def with_logprobs(run: Run, batch: SequenceBatch) -> SequenceBatch:
    """Adds what the loss needs: the policy's own log-probabilities before the update, and the frozen reference's.

    With router replay from this pass, also the experts that it chose.
    """
    cfg, loss, replay = run.recipe.grpo, run.recipe.loss_fn, run.recipe.policy.router_replay
    values: dict = {}
    if not loss.force_on_policy_ratio or cfg.seq_logprob_error_threshold is not None:
        if replay.enabled and replay.source == "logprob":
            values["prev_logprobs"], values[ROUTED_EXPERTS] = run.policy.logprobs_and_routes(batch)
        else:
            values["prev_logprobs"] = run.policy.logprobs(batch)
    if loss.reference_policy_kl_penalty > 0 and not cfg.skip_reference_policy_logprobs_calculation:
        values["reference_logprobs"] = run.policy.logprobs(batch, reference=True)
    batch = batch.with_values(tokens=values)
    if cfg.seq_logprob_error_threshold is None:
        return batch
    keep = sequence_error_mask(
        torch.from_numpy(batch.token_values["prev_logprobs"]),
        torch.from_numpy(batch.token_values["generation_logprobs"]),
        torch.from_numpy(batch.token_mask).float(),
        torch.from_numpy(batch.sequence_ids),
        len(batch),
        cfg.seq_logprob_error_threshold,
    )
    return batch.with_values(samples={"sample_mask": batch.sample_values["sample_mask"] * keep.numpy()})
