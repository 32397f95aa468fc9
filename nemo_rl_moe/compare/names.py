"""Names: how other sources call our metrics, and the rows of a comparison."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from nemo_rl_moe.compare.run_data import Series

# NeMo-RL's name -> ours. A name that both sides use is not here. Ours wins where a source has both.
_ALIASES = {
    "train/mean_total_tokens_per_sample": "train/mean_tokens_per_sample",
    "train/total_num_tokens": "performance/total_num_tokens",
    "timing/train/prepare_for_generation/total": "timing/train/weight_sync",
    "timing/validation/total_validation_time": "timing/train/validation",
}
# Ray's monitor reports every GPU by itself, over its own count of seconds instead of training steps.
_GPU_MEMORY = re.compile(r"ray/node\.\d+\.gpu\.\d+\.mem_gb")
MEMORY_PEAK = "policy/memory_peak_gib"


@dataclass(frozen=True)
class Row:
    """One line of a comparison.

    Attributes:
        key: stable name in JSON.
        group: heading that it stands under.
        label: what it is.
        metric: our metric name.
        unit: of the values.
        change: `percent` of the baseline's mean, or plain `difference`.
        better: direction that is an improvement; None where neither is.
        seconds: for rates, the metric of the seconds that each step's rate was taken over.
        reduce: how the window's steps become one number.
    """

    key: str
    group: str
    label: str
    metric: str
    unit: str
    change: Literal["percent", "difference"] = "percent"
    better: Literal["lower", "higher"] | None = None
    seconds: str | None = None
    reduce: Literal["mean", "largest"] = "mean"


STEP_TIME, THROUGHPUT, LEARNING, RESOURCES = "Step time", "Throughput per GPU", "Learning", "Lengths and memory"
_PHASES = (
    ("e2e", "end to end", "total_step_time", ""),
    ("policy_training", "policy training", "policy_training", "policy_training_"),
    ("logprob", "log-probabilities", "policy_and_reference_logprobs", "policy_and_reference_logprobs_"),
    ("generation", "generation", "generation", "generation_"),
    ("refit", "refit", "weight_sync", None),
    ("exposed_generation", "exposed generation", "exposed_generation", None),
)

ROWS: tuple[Row, ...] = (
    *(
        Row(f"step_time.{key}", STEP_TIME, label, f"timing/train/{phase}", "s", better="lower")
        for key, label, phase, _ in _PHASES
    ),
    *(
        Row(
            f"throughput.{key}",
            THROUGHPUT,
            label,
            f"performance/{prefix}tokens_per_sec_per_gpu",
            "tokens/s",
            better="higher",
            seconds=f"timing/train/{phase}",
        )
        for key, label, phase, prefix in _PHASES
        if prefix is not None
    ),
    Row("reward", LEARNING, "mean reward", "train/reward", "", "difference", "higher"),
    Row("gen_kl_error", LEARNING, "gen_kl_error", "train/gen_kl_error", "nat", better="lower"),
    Row("token_mult_prob_error", LEARNING, "token_mult_prob_error", "train/token_mult_prob_error", "", better="lower"),
    Row("tokens_per_sample", RESOURCES, "tokens per sample", "train/mean_tokens_per_sample", "tokens"),
    Row("memory_peak", RESOURCES, "memory peak", MEMORY_PEAK, "GiB", better="lower", reduce="largest"),
)
TOKENS = "performance/total_num_tokens"
TOKENS_PER_SAMPLE = "train/mean_tokens_per_sample"
ACCURACY, ACCURACY_SAMPLES = "validation/accuracy", "validation/num_samples"


def ours(found: Mapping[str, Series]) -> dict[str, Series]:
    """A source's series by our names.

    GPU memory of Ray's monitor becomes one value at the last training step: the most that any GPU ever held.
    """
    named = {_ALIASES.get(name, name): values for name, values in found.items() if name in _ALIASES}
    named |= {name: values for name, values in found.items() if name not in _ALIASES}
    gpus = [name for name in named if _GPU_MEMORY.fullmatch(name)]
    peaks = [np.nanmax(named[name].values) for name in gpus if not np.all(np.isnan(named[name].values))]
    if peaks and MEMORY_PEAK not in named:
        last = max((int(named[name].steps[-1]) for name in named if name.startswith("train/")), default=0)
        named[MEMORY_PEAK] = Series(np.array([last], dtype=np.int64), np.array([max(peaks)]))
    return {name: values for name, values in named.items() if name not in gpus}
