"""Runs made from published tables: series by step whose means over steps 2-20 are the published numbers.

`hybridep_tables.json` holds a report on Mixture-of-Experts dispatchers on GB200 machines (AlltoAll -> HybridEP). Only
its means are published, rounded; how a step differs from the next is made up here, and the means are the ones within
their rounding that have the published change.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

TABLES = json.loads((Path(__file__).parent / "hybridep_tables.json").read_text())
WORKLOADS: dict[str, dict[str, Any]] = TABLES["workloads"]
PRINTED: dict[str, dict[str, float]] = TABLES["printed_changes_percent"]
FIRST, LAST = TABLES["steps"]
SYNC, ASYNC, NEMOTRON, QWEN_235B = WORKLOADS

# Key of the tables, key of the printed changes, metric of the rate, metric of the seconds.
PHASES = (
    ("e2e", "e2e", "tokens_per_sec_per_gpu", "total_step_time"),
    ("policy_training", "train", "policy_training_tokens_per_sec_per_gpu", "policy_training"),
    (
        "logprob",
        "logprob",
        "policy_and_reference_logprobs_tokens_per_sec_per_gpu",
        "policy_and_reference_logprobs",
    ),
)
_DISPATCHERS = (
    {"moe_token_dispatcher_type": "alltoall"},
    {
        "moe_token_dispatcher_type": "flex",
        "moe_flex_dispatcher_backend": "hybridep",
        "moe_hybridep_prepad_packed_inputs": True,
    },
)


def waves(count: int, seed: int) -> np.ndarray:
    """float64 [count] with mean 0 and variance 1 exactly, and no outlier."""
    values = np.random.default_rng(seed).uniform(-1, 1, count)
    values -= values.mean()
    return values / values.std()


def unrounded(workload: str, table: str, key: str, arm: int) -> float:
    """The mean behind a number with two decimals: both are moved apart until they have the printed change."""
    pair = WORKLOADS[workload][table][key]
    short = next(phase[1] for phase in PHASES if phase[0] == key)
    printed = PRINTED[workload][f"{short}_{'s' if table == 'step_time_s' else 'tok'}"]
    for moved in sorted(np.linspace(-0.0049, 0.0049, 99), key=abs):
        before, after = pair[0] - moved, pair[1] + moved
        if abs((after / before - 1) * 100 - printed) <= 0.049:
            return (before, after)[arm]
    raise AssertionError(f"{workload} {key}: no pair that rounds to {pair} has the change {printed}")


def metrics(workload: str, arm: int) -> dict[str, np.ndarray]:
    """Series over steps 1-20 of one arm (0 baseline, 1 run). Step 1, the warm-up, is far off on purpose."""
    table, count = WORKLOADS[workload], LAST - FIRST + 1
    found: dict[str, np.ndarray] = {}
    for number, (key, _, rate, phase) in enumerate(PHASES):
        seconds, tokens = (unrounded(workload, t, key, arm) for t in ("step_time_s", "tokens_per_sec_per_gpu"))
        # Slow steps have low rates: mean(rate x time) = whole x mean(time) fixes the product of the two spreads.
        whole = (
            table["whole_window_tokens_per_sec_per_gpu"][arm] if "whole_window" in str(table) and key == "e2e" else None
        )
        product = seconds * (tokens - whole) if whole else 1e-4 * seconds * tokens
        spread = np.sqrt(product * tokens / seconds)
        wave = waves(count, seed=2 * number + arm)
        found[f"performance/{rate}"] = tokens + spread * wave
        found[f"timing/train/{phase}"] = seconds - product / spread * wave
    for number, key in enumerate(("reward", "gen_kl_error")):
        mean = table[key][arm]
        found[f"train/{key}"] = mean + 0.1 * mean * waves(count, seed=10 + 2 * number + arm)
    if "mean_tokens_per_sample" in table:
        found["train/mean_tokens_per_sample"] = table["mean_tokens_per_sample"][arm] + 100 * waves(count, seed=20 + arm)
        found["timing/train/exposed_generation"] = table["exposed_generation_s"][arm] + 5 * waves(count, seed=22 + arm)
    return {name: np.concatenate([[10 * values[0]], values]) for name, values in found.items()}


def rows(workload: str, arm: int) -> list[dict[str, float]]:
    """The same as rows of metrics, validation at the last step included."""
    table, found = WORKLOADS[workload], metrics(workload, arm)
    listed = [{"step": step} | {n: float(v[step - 1]) for n, v in found.items()} for step in range(1, LAST + 1)]
    samples = table["validation_samples"]
    # Printed with four digits, logged with all: the nearest accuracy that so many samples can have.
    accuracy = round(table["validation_accuracy"][arm] * samples) / samples
    listed[-1] |= {"validation/accuracy": accuracy, "validation/num_samples": float(samples)}
    return listed


def config(arm: int, gpus: int = 16) -> dict[str, Any]:
    """What the two arms differ in: the dispatcher and where they log."""
    return {
        "grpo": {"max_num_steps": LAST, "num_prompts_per_step": 64},
        "policy": {"megatron_cfg": dict(_DISPATCHERS[arm])},
        "cluster": {"num_nodes": gpus // 4, "gpus_per_node": 4},
        "logger": {"log_dir": f"logs/arm{arm}"},
    }


def write_run(folder: Path, workload: str, arm: int, steps: int = LAST, **manifest: Any) -> Path:
    """A run directory of ours that ended after `steps`; `manifest` replaces fields of a run that is done."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(workload, arm)[:steps]))
    (folder / "config.yaml").write_text(yaml.safe_dump(config(arm, WORKLOADS[workload]["gpus"])))
    done = {"exit_code": 0, "reason": "done", "versions": {"torch": "2.11.0"}, "host": {"name": f"node{arm}"}}
    (folder / "manifest.json").write_text(json.dumps(done | manifest))
    return folder
