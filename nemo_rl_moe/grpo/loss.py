"""The clipped policy-gradient loss with a KL term, as each micro-batch's share of the global mean.

L = mean over tokens of [ w_t S_t + beta KL_t ], with

- r_t = exp(log p_t - log p_prev,t) (PPO, arXiv:1707.06347), or for `sequence_level_importance_ratios` the geometric
  mean of a sequence's r_t (GSPO, arXiv:2507.18071), or for `force_on_policy_ratio` 1 with the gradient of log p_t;
- S_t = max(-A r, -A clip(r, 1 - ratio_clip_min, 1 + ratio_clip_max)); with `ratio_clip_c` and A < 0 at most
  -A ratio_clip_c (dual clip, arXiv:1912.09729);
- w_t: `importance_weights`, or 1 without the correction; no gradient;
- KL_t: `kl_estimate` against the reference (arXiv:2402.03300).

The mean is over all tokens of the global batch (`token_level_loss`), or over its sequences of each one's token mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_rl_moe.grpo.importance import importance_weights
from nemo_rl_moe.grpo.kl import kl_estimate
from nemo_rl_moe.grpo.metrics import agreement_metrics, approximate_entropy, extreme
from nemo_rl_moe.grpo.tensors import bounded_exp, kept_logprobs, sequence_mean, sequence_sum, where_kept
from nemo_rl_moe.grpo.types import GlobalCounts, TokenBatch
from nemo_rl_moe.recipe.schema import LossConfig


def grpo_loss(config: LossConfig, batch: TokenBatch, counts: GlobalCounts) -> tuple[Tensor, dict[str, Tensor]]:
    """This micro-batch's share of the loss and metrics of the global batch; the formula is in the module's docstring.

    Shares are sums divided by the global counts: adding those of all micro-batches and ranks gives L and its gradient,
    however the sequences are split. Scaling for DDP is the caller's.

    Log-ratios are exponentiated up to plus or minus 20, so value and gradient are finite for every finite input and for
    log-probabilities of -inf. NaN in a counting token's log-probability makes the loss NaN, so that the trainer can see
    it and skip the update.

    Returns:
        Scalar loss, attached to batch.logprobs (0 with gradient 0 when no token counts), and detached scalar metrics.
        `*_max` and `*_min` join by max and min, all others by addition. `loss`, `policy_loss` and `kl_penalty` (without
        beta) are means like the loss; `sampling_importance_ratio` is a mean over sequences with sequence-level ratios;
        `empty_microbatches` counts those without a counting token; the rest are token means.

    Raises:
        ValueError: previous or reference log-probabilities are needed and missing, or a truncation lacks its bound.
    """
    keep = batch.mask > 0
    logprobs = kept_logprobs(keep, batch.logprobs)
    prev = _previous_logprobs(config, batch, keep, logprobs)
    generation = kept_logprobs(keep, batch.generation_logprobs)

    ratio = _policy_ratio(config, batch, logprobs - prev)
    surrogate, clamped, clipped = clipped_surrogate(config, ratio, where_kept(keep, batch.advantages))
    weights, outside = _sampling_weights(config, batch, prev, generation)
    if config.use_importance_sampling_correction:
        surrogate = weights * surrogate
    policy_loss = _loss_mean(config.token_level_loss, surrogate, batch, counts)
    kl = _loss_mean(config.token_level_loss, _reference_kl(config, batch, keep, logprobs), batch, counts)
    beta = config.reference_policy_kl_penalty
    loss = policy_loss + beta * kl if beta else policy_loss

    with torch.no_grad():
        per_token = {
            "clip_fraction": clipped.to(loss.dtype),
            "importance_out_of_bounds": outside.to(loss.dtype),
            "approx_entropy": _entropy(batch, keep, logprobs, generation),
            **agreement_metrics(prev, generation),
        }
        by_token = not config.sequence_level_importance_ratios
        metrics = {name: _token_mean(values, batch, counts) for name, values in per_token.items()} | {
            "loss": loss.detach(),
            "policy_loss": policy_loss.detach(),
            "kl_penalty": kl.detach(),
            "sampling_importance_ratio": _loss_mean(by_token, weights, batch, counts),
            "empty_microbatches": (~keep.any()).to(loss.dtype),
            **_ratio_metrics(batch, counts, keep, ratio, clamped),
        }
    return loss, metrics


def clipped_surrogate(config: LossConfig, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """S = max(-A r, -A clip(r)), at most -A c for A < 0 with a dual clip c.

    Args:
        ratio, advantages: [T].

    Returns:
        S [T]; the clipped ratio [T]; bool [T], True where a clip took the gradient away.
    """
    clamped = ratio.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max)
    plain, bounded = -advantages * ratio, -advantages * clamped
    surrogate, clipped = torch.maximum(plain, bounded), bounded > plain
    if config.ratio_clip_c is not None:
        ceiling = -advantages * config.ratio_clip_c
        capped = (advantages < 0) & (surrogate > ceiling)
        surrogate, clipped = torch.where(capped, ceiling, surrogate), clipped | capped
    return surrogate, clamped, clipped


def _previous_logprobs(config: LossConfig, batch: TokenBatch, keep: Tensor, logprobs: Tensor) -> Tensor:
    """[T] without gradient; the current ones when the ratio is forced to 1."""
    if config.force_on_policy_ratio:
        return logprobs.detach()
    if batch.prev_logprobs is None:
        raise ValueError("prev_logprobs is None, which needs loss_fn.force_on_policy_ratio")
    return kept_logprobs(keep, batch.prev_logprobs).detach()


def _policy_ratio(config: LossConfig, batch: TokenBatch, log_ratio: Tensor) -> Tensor:
    """Ratios [T], of each token or of its sequence."""
    if config.sequence_level_importance_ratios:
        means = sequence_mean(log_ratio, batch.mask, batch.sequence_ids, batch.num_sequences)
        log_ratio = means[batch.sequence_ids]
    return bounded_exp(log_ratio)


def _sampling_weights(config: LossConfig, batch: TokenBatch, prev: Tensor, generation: Tensor) -> tuple[Tensor, Tensor]:
    """Importance weights [T] between trainer and engine, and where they are out of bounds."""
    return importance_weights(
        prev,
        generation,
        batch.mask,
        batch.sequence_ids,
        batch.num_sequences,
        truncation=config.truncated_importance_sampling_type,
        upper=config.truncated_importance_sampling_ratio,
        lower=config.truncated_importance_sampling_ratio_min,
        sequence_level=config.sequence_level_importance_ratios,
    )


def _entropy(batch: TokenBatch, keep: Tensor, logprobs: Tensor, generation: Tensor) -> Tensor:
    """[T]: the distribution's own entropy where the trainer computed it, an estimate from the samples elsewhere."""
    entropy = approximate_entropy(logprobs, generation) if batch.entropy is None else batch.entropy
    return where_kept(keep, entropy)


def _ratio_metrics(
    batch: TokenBatch, counts: GlobalCounts, keep: Tensor, ratio: Tensor, clamped: Tensor
) -> dict[str, Tensor]:
    return {
        "probs_ratio": _token_mean(ratio, batch, counts),
        "probs_ratio_clamped": _token_mean(clamped, batch, counts),
        "probs_ratio_max": extreme(ratio, keep, counts.tokens, largest=True),
        "probs_ratio_min": extreme(ratio, keep, counts.tokens, largest=False),
    }


def _reference_kl(config: LossConfig, batch: TokenBatch, keep: Tensor, logprobs: Tensor) -> Tensor:
    """KL estimates [T]; zeros without a reference."""
    if batch.reference_logprobs is None:
        if config.reference_policy_kl_penalty:
            raise ValueError("reference_logprobs is None, which needs loss_fn.reference_policy_kl_penalty 0")
        return torch.zeros_like(logprobs)
    return kl_estimate(
        logprobs,
        kept_logprobs(keep, batch.reference_logprobs).detach(),
        config.reference_policy_kl_type,
        config.kl_input_clamp_value,
        config.kl_output_clamp_value,
    )


def _token_mean(values: Tensor, batch: TokenBatch, counts: GlobalCounts) -> Tensor:
    """This micro-batch's share of the mean over the global batch's tokens."""
    return (values * batch.mask).sum() / max(counts.tokens, 1.0)


def _loss_mean(token_level: bool, values: Tensor, batch: TokenBatch, counts: GlobalCounts) -> Tensor:
    """Share of the token mean, or of the mean over sequences of their token means."""
    if token_level:
        return _token_mean(values, batch, counts)
    # Divided token by token, so that a sequence without counting tokens adds 0 and not 0/0.
    lengths = sequence_sum(batch.mask, batch.sequence_ids, batch.num_sequences)
    weights = batch.mask / lengths.clamp(min=1)[batch.sequence_ids]
    return (values * weights).sum() / max(counts.sequences, 1.0)
