"""A workload from run directories, and how well the simulation repeats the runs it came from.

Of one run, the lengths and the time of every phase are known at its own placement. What its logs lack is assumed:

- Prompt and response lengths. Logged is the mean of their sum. How it divides, and how responses differ, comes from the
  text of the rollouts, as if every token had the same number of characters. Without rollouts all responses are equally
  long: the mean, or the recipe's limit where that is less, and prompts the rest.
- The curve of the generation speed. A batch of requests that start together takes
  `decode_latency_s x longest + tokens / (devices x peak_tokens_per_second)` seconds: two unknowns. Runs at two or more
  loads give both, by least squares. One run gives the second alone, without latency: generation then takes time in
  inverse proportion to its devices, which is too long with fewer of them and too short with more.
- Phases at other numbers of devices (`phase_seconds`), and the refit in the other placement, which is taken as equal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from nemo_rl_moe.bench.placement.predict import predict_own
from nemo_rl_moe.bench.placement.simulate import DEFAULT_STEPS, Outcome, Steps
from nemo_rl_moe.bench.placement.workload import Workload
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.load import load_recipe
from nemo_rl_moe.recipe.placement import split_devices
from nemo_rl_moe.recipe.schema import Recipe
from nemo_rl_moe.recipe.schema.policy import PolicyConfig
from nemo_rl_moe.tracking.metrics_log import by_step, read_rows

_TIME = "timing/train/"
_TIMED = (
    "total_step_time",
    "generation",
    "exposed_generation",
    "reward",
    "policy_and_reference_logprobs",
    "policy_training",
    "weight_sync",
)
_NEEDED = (*(f"{_TIME}{name}" for name in _TIMED), "train/mean_tokens_per_sample")


@dataclass(frozen=True)
class MeasuredRun:
    """Means of one run over its steps.

    Args:
        path: run directory.
        recipe: what it ran.
        steps: numbers of the steps taken.
        mean: metric by name; seconds, tokens.
        prompt_tokens: mean tokens of a prompt.
        responses: tokens of responses; empty when the run has no rollouts.
    """

    path: Path
    recipe: Recipe
    steps: list[int]
    mean: dict[str, float]
    prompt_tokens: float
    responses: list[float]

    @property
    def samples(self) -> int:
        """Samples of a step."""
        return self.recipe.grpo.num_prompts_per_step * self.recipe.grpo.num_generations_per_prompt

    @property
    def response_tokens(self) -> float:
        """Mean tokens of a response."""
        return self.mean["train/mean_tokens_per_sample"] - self.prompt_tokens

    def seconds(self, phase: str) -> float:
        """Mean seconds of a phase in a step."""
        return self.mean[f"{_TIME}{phase}"]


@dataclass(frozen=True)
class Check:
    """A run against its own simulation; seconds a step, and the relative error of the simulation."""

    run: str
    measured_step_s: float
    simulated: Outcome
    error: float


def read_run(path: Path, skip: int = 1) -> MeasuredRun:
    """Reads a run directory.

    Args:
        path: holds `config.yaml` and `metrics.jsonl`; `rollouts/` too if the run wrote them.
        skip: training steps at the start that do not count (warm-up).

    Raises:
        UserError: a file or metric is missing, or no step is left; names it.
    """
    for name in ("config.yaml", "metrics.jsonl"):
        if not (path / name).is_file():
            raise UserError(f"{path}: no {name}, expected the directory of a run")
    recipe = load_recipe(path / "config.yaml", check=False).recipe
    rows = {s: m for s, m in by_step(read_rows(path / "metrics.jsonl")).items() if f"{_TIME}total_step_time" in m}
    steps = sorted(rows)[skip:]
    if not steps:
        raise UserError(f"{path / 'metrics.jsonl'}: {len(rows)} training step(s), expected more than {skip}")
    for step in steps:
        missing = [name for name in _NEEDED if not math.isfinite(rows[step].get(name, math.nan))]
        if missing:
            raise UserError(f"{path / 'metrics.jsonl'}: step {step} has no {missing[0]}")
    mean = {name: fmean(rows[step][name] for step in steps) for name in _NEEDED}
    prompt, responses = _lengths(path, steps, mean["train/mean_tokens_per_sample"], recipe.policy)
    return MeasuredRun(path, recipe, steps, mean, prompt, responses)


def measured_workload(runs: Sequence[MeasuredRun]) -> Workload:
    """One workload from one or more runs of the same model on the same kind of device; lengths are the first run's.

    Raises:
        UserError: runs on different kinds of devices, or a run without time in training or generation.
    """
    first = runs[0]
    for run in runs:
        require_same_devices(first.recipe, run.recipe, str(run.path))
        if min(run.seconds("policy_training"), run.seconds("generation")) <= 0:
            raise UserError(f"{run.path}: no time in policy_training or generation")
    latency, peak = _generation_speed(runs)
    colocated = [r.seconds("weight_sync") for r in runs if r.recipe.policy.generation.colocated.enabled]
    split = [r.seconds("weight_sync") for r in runs if not r.recipe.policy.generation.colocated.enabled]
    responses: dict[str, Any] = {"distribution": "empirical", "tokens": first.responses}
    if not first.responses:
        responses = {"distribution": "constant", "tokens": first.response_tokens}
    return Workload.model_validate(
        {
            "prompt_tokens": first.prompt_tokens,
            "response_tokens": responses,
            "generation": {"decode_latency_s": latency, "peak_tokens_per_second": peak},
            "training": _speeds(runs, "policy_training"),
            "logprobs": _speeds(runs, "policy_and_reference_logprobs"),
            "refit": {"colocated_s": fmean(colocated or split), "split_s": fmean(split or colocated)},
            "reward_s": first.seconds("reward"),
            "other_s": fmean(map(_other_seconds, runs)),
        }
    )


def check_runs(runs: Sequence[MeasuredRun], workload: Workload, steps: Steps = DEFAULT_STEPS) -> list[Check]:
    """Simulates each run at its own placement and compares its mean step time."""
    checks = []
    for run in runs:
        simulated = predict_own(run.recipe, workload, steps)
        measured = run.seconds("total_step_time")
        checks.append(Check(str(run.path), measured, simulated, simulated.step_s / measured - 1))
    return checks


def require_same_devices(recipe: Recipe, other: Recipe, where: str) -> None:
    """Speeds per device say nothing about another kind of device.

    Raises:
        UserError: the recipes' devices differ.
    """
    a, b = recipe.cluster, other.cluster
    kinds = [(c.device, c.cpus_per_device if c.device == "cpu" else 1) for c in (a, b)]
    if kinds[0] != kinds[1]:
        shown = [f"{device} devices" + (f" of {cores} core(s)" if device == "cpu" else "") for device, cores in kinds]
        raise UserError(f"{where}: ran on {shown[1]}, expected {shown[0]}: speeds are per device")


def _other_seconds(run: MeasuredRun) -> float:
    """What the driver did besides the phases; of generation, what the step waited for."""
    phases = ["exposed_generation", "policy_and_reference_logprobs", "policy_training", "weight_sync"]
    # Scoring overlaps training when generation runs ahead.
    phases += ["reward"] if run.recipe.policy.generation.colocated.enabled else []
    return max(0.0, run.seconds("total_step_time") - sum(map(run.seconds, phases)))


def _speeds(runs: Sequence[MeasuredRun], phase: str) -> list[dict[str, float]]:
    speeds: dict[int, list[float]] = {}
    for run in runs:
        seconds, devices = run.seconds(phase), len(split_devices(run.recipe).policy)
        if seconds > 0:
            tokens = run.mean["train/mean_tokens_per_sample"] * run.samples
            speeds.setdefault(devices, []).append(tokens / seconds / devices)
    return [{"devices": n, "tokens_per_second_per_device": fmean(values)} for n, values in speeds.items()]


def _generation_speed(runs: Sequence[MeasuredRun]) -> tuple[float, float]:
    """Latency in seconds and peak rate in tokens per second, by least squares with neither below 0."""
    rows = []
    for run in runs:
        longest = max(run.responses, default=run.response_tokens)
        tokens = run.response_tokens * run.samples / len(split_devices(run.recipe).generation)
        # Each equation is divided by its time, so that the fit is of relative errors.
        rows.append((longest / run.seconds("generation"), tokens / run.seconds("generation")))
    xx, xy, yy = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    x, y = (sum(r[i] for r in rows) for i in (0, 1))
    determinant = xx * yy - xy * xy
    if len(runs) > 1 and determinant > 1e-9 * xx * yy:
        latency, per_token = (x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant
        if latency >= 0 and per_token > 0:
            return latency, 1 / per_token
    return 0.0, yy / y


def _lengths(path: Path, steps: Sequence[int], mean_tokens: float, policy: PolicyConfig) -> tuple[float, list[float]]:
    """Mean prompt tokens, and response tokens, from the texts of the rollouts; both means add up to `mean_tokens`.

    A cut response has as many tokens as the limit allows, which gives the characters of a token. Where none is cut,
    prompts and responses are taken to have the same.
    """
    samples: list[dict[str, Any]] = []
    for step in steps:
        file = path / "rollouts" / f"step_{step}.jsonl"
        if file.is_file():
            samples += [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
    if not samples:
        return max(0.0, mean_tokens - policy.generation.max_new_tokens), []
    characters = [max(1, len(sample["response"])) for sample in samples]
    prompt_characters = sum(len(sample["problem"]) for sample in samples)
    prompt_tokens = mean_tokens * prompt_characters / (prompt_characters + sum(characters))
    limit = min(policy.generation.max_new_tokens, policy.max_total_sequence_length - prompt_tokens)
    cut = [length for length, sample in zip(characters, samples, strict=True) if sample["truncated"]]
    scale = limit / fmean(cut) if cut else (mean_tokens - prompt_tokens) / fmean(characters)
    responses = [
        limit if sample["truncated"] else min(limit, scale * length)
        for length, sample in zip(characters, samples, strict=True)
    ]
    # Few samples of a long run may be longer than its mean allows.
    responses = [length * min(1.0, mean_tokens / fmean(responses)) for length in responses]
    return max(0.0, mean_tokens - fmean(responses)), responses
