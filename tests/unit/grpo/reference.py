"""An independent reference: numpy float64, a loop over tokens, straight from the formulas; none of our code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nemo_rl_moe.grpo.types import GlobalCounts, TokenBatch


@dataclass
class Case:
    """Float64 inputs of a loss, [T] each; `sequences` numbers the sequence of each token."""

    logprobs: np.ndarray
    prev: np.ndarray
    generation: np.ndarray
    reference: np.ndarray
    advantages: np.ndarray
    mask: np.ndarray
    sequences: np.ndarray

    @property
    def num_sequences(self) -> int:
        return int(self.sequences.max()) + 1 if len(self.sequences) else 0

    @property
    def counts(self) -> GlobalCounts:
        used = [s for s, m in zip(self.sequences, self.mask, strict=True) if m]
        return GlobalCounts(float(len(used)), float(len(set(used))))

    def batch(self, dtype: torch.dtype = torch.float64, rows: np.ndarray | None = None) -> TokenBatch:
        """The tokens `rows` (all of them by default) as a TokenBatch whose log-probabilities ask for a gradient."""
        rows = np.arange(len(self.mask)) if rows is None else rows

        def tensor(values: np.ndarray) -> torch.Tensor:
            return torch.tensor(values[rows], dtype=dtype)

        return TokenBatch(
            logprobs=tensor(self.logprobs).requires_grad_(),
            prev_logprobs=tensor(self.prev),
            generation_logprobs=tensor(self.generation),
            reference_logprobs=tensor(self.reference),
            advantages=tensor(self.advantages),
            mask=tensor(self.mask),
            sequence_ids=torch.tensor(self.sequences[rows], dtype=torch.int64),
            num_sequences=self.num_sequences,
        )


def random_case(seed: int, lengths: Sequence[int] = (5, 1, 7, 3, 4), spread: float = 0.4) -> Case:
    """Sequences whose four log-probabilities differ by about `spread`; about a quarter of the tokens is masked."""
    rng = np.random.default_rng(seed)
    sequences = np.repeat(np.arange(len(lengths)), lengths)
    total = len(sequences)
    logprobs = -rng.exponential(1.5, total) - 0.01
    near = [logprobs + spread * rng.standard_normal(total) for _ in range(3)]
    advantages = rng.standard_normal(len(lengths))[sequences]
    mask = (rng.random(total) > 0.25).astype(np.float64)
    mask[0] = 1.0
    return Case(logprobs, *near, advantages, mask, sequences)


def kl(policy: float, reference: float, kind: str) -> float:
    """Schulman's estimators of KL(policy || reference)."""
    x = reference - policy
    return {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[kind]


def clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def loss(case: Case, config: dict[str, Any], logprobs: np.ndarray | None = None) -> dict[str, float]:
    """Loss and metrics over the whole case. `config` has the names of the recipe's loss_fn."""
    current = case.logprobs if logprobs is None else logprobs
    frozen = case.logprobs if config["force_on_policy_ratio"] else case.prev
    sums: dict[str, float] = {}
    by_sequence: dict[str, list[float]] = {"policy_loss": [], "kl_penalty": [], "sampling_importance_ratio": []}
    for s in sorted(set(case.sequences.tolist())):
        tokens = [t for t in range(len(current)) if case.sequences[t] == s and case.mask[t]]
        if not tokens:
            continue
        collected: dict[str, list[float]] = {name: [] for name in by_sequence}
        for t in tokens:
            values = _token(case, config, current, frozen, tokens, t)
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + value
            for name in by_sequence:
                collected[name].append(values[name])
        for name, values_of in collected.items():
            by_sequence[name].append(sum(values_of) / len(values_of))
    out = {name: total / case.counts.tokens for name, total in sums.items()}
    if not config["token_level_loss"]:
        out |= {name: sum(by_sequence[name]) / case.counts.sequences for name in ("policy_loss", "kl_penalty")}
    if config["sequence_level_importance_ratios"]:
        out["sampling_importance_ratio"] = sum(by_sequence["sampling_importance_ratio"]) / case.counts.sequences
    out["loss"] = out["policy_loss"] + config["reference_policy_kl_penalty"] * out["kl_penalty"]
    return out


def _token(
    case: Case, config: dict[str, Any], current: np.ndarray, frozen: np.ndarray, tokens: list[int], t: int
) -> dict[str, float]:
    ratio = math.exp(current[t] - frozen[t])
    weight = math.exp(frozen[t] - case.generation[t])
    if config["sequence_level_importance_ratios"]:
        ratio = math.exp(sum(current[u] - frozen[u] for u in tokens) / len(tokens))
        weight = math.exp(sum(frozen[u] - case.generation[u] for u in tokens))
    geometric = math.exp(sum(frozen[u] - case.generation[u] for u in tokens) / len(tokens))
    weight, outside = truncate(config, weight, geometric)

    a = case.advantages[t]
    clamped = clamp(ratio, 1 - config["ratio_clip_min"], 1 + config["ratio_clip_max"])
    surrogate = max(-a * ratio, -a * clamped)
    clipped = -a * clamped > -a * ratio
    if config["ratio_clip_c"] is not None and a < 0 and surrogate > -a * config["ratio_clip_c"]:
        surrogate, clipped = -a * config["ratio_clip_c"], True
    if config["use_importance_sampling_correction"]:
        surrogate *= weight

    bound = config["kl_input_clamp_value"] or math.inf
    x = clamp(case.reference[t] - current[t], -bound, bound)
    top = config["kl_output_clamp_value"] or math.inf
    p, q = math.exp(frozen[t]), math.exp(case.generation[t])
    m = (p + q) / 2
    js = ((p / m - 1 - math.log(p / m)) + (q / m - 1 - math.log(q / m))) / 2
    return {
        "policy_loss": surrogate,
        "kl_penalty": clamp(kl(0.0, x, config["reference_policy_kl_type"]), -top, top),
        "probs_ratio": ratio,
        "probs_ratio_clamped": clamped,
        "clip_fraction": float(clipped),
        "sampling_importance_ratio": weight,
        "importance_out_of_bounds": float(outside),
        "gen_kl_error": kl(case.generation[t], frozen[t], "k3"),
        "policy_kl_error": kl(frozen[t], case.generation[t], "k3"),
        "js_divergence_error": js,
        "token_mult_prob_error": max(p / q, q / p),
        "approx_entropy": -math.exp(current[t] - case.generation[t]) * current[t],
    }


def truncate(config: dict[str, Any], weight: float, geometric: float) -> tuple[float, bool]:
    """The weight of a token as the loss uses it, and whether it was out of bounds."""
    kind = config["truncated_importance_sampling_type"]
    high, low = config["truncated_importance_sampling_ratio"], config["truncated_importance_sampling_ratio_min"] or 0.0
    if kind == "tis":
        return min(weight, high), weight > high
    if kind == "icepop":
        return (weight, False) if low <= weight <= high else (0.0, True)
    if kind == "seq-mask-tis":
        return (weight, False) if low <= geometric <= high else (0.0, True)
    return weight, False


def advantages(
    rewards: Sequence[float], groups: Sequence[int], leave_one_out: bool, normalize: bool, valid: Sequence[float]
) -> list[float]:
    """Group advantages, sample by sample: r - mean, over unbiased std + 1e-6 where there is one."""
    out = []
    for i, reward in enumerate(rewards):
        members = [j for j, g in enumerate(groups) if g == groups[i] and valid[j]]
        if not valid[i] or len(members) < 2:
            out.append(0.0)
            continue
        base = np.array([rewards[j] for j in members if j != i or not leave_one_out], dtype=np.float64)
        advantage = reward - base.mean()
        if normalize and len(base) > 1 and base.max() > base.min():
            advantage /= base.std(ddof=1) + 1e-6
        out.append(float(advantage))
    return out
