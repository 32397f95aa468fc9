"""Every metric, once: name, unit, what it is, how it is reduced. docs/metrics.md is made from this table.

A name ending in `<...>` stands for a family, such as `validation/accuracy/<env>`. Plain data: imports nothing heavy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class Metric:
    """One metric.

    Args:
        name: as logged.
        unit: of the value; `1` for pure numbers.
        definition: what the value is.
        reducer: how values of tokens, samples, micro-batches, ranks and optimizer steps become one number a step.
    """

    name: str
    unit: str
    definition: str
    reducer: str

    @property
    def group(self) -> str:
        """The part of the name before the last slash."""
        return self.name.split("/<")[0].rpartition("/")[0] or self.name


# Reducers by name; the introduction of the page says what they are.
_TOKENS = "token mean"
_LOSS = "loss mean"
_SAMPLES = "sample mean"
_COUNT = "sum"
_CLOCK = "sum"
_RATE = "quotient"

_TIMING = (
    (
        "total_step_time",
        "The whole step, from the end of the one before. Validation and checkpointing count when they fall into it.",
    ),
    (
        "generation",
        "Sampling and decoding the responses. Generation that runs ahead counts in the step in which it ends.",
    ),
    (
        "exposed_generation",
        "The part of generation that the step waited for: all of it when sync, the wait for samples when async.",
    ),
    ("reward", "Scoring the responses in their environments."),
    ("data", "Drawing prompts, joining prompts and responses."),
    ("policy_and_reference_logprobs", "Log-probabilities of the policy before the update, and of the reference."),
    ("policy_training", "Forward, backward and optimizer steps."),
    ("weight_sync", "Bringing the generator to the new weights; when colocated, its sleep and waking too."),
    ("validation", "Validation, its generation and scoring included. Only in steps that validate."),
    ("checkpointing", "Saving a checkpoint. Only in steps that save."),
    ("other", "total_step_time less every phase of the driver: logging, advantages, and what nobody timed."),
)

_PERFORMANCE = (
    (
        "total_num_tokens",
        "token",
        "Prompt and response tokens of the samples trained on, without padding.",
        _COUNT,
    ),
    (
        "tokens_per_sec_per_gpu",
        "token/s/device",
        "End to end: total_num_tokens / total_step_time / all devices.",
        _RATE,
    ),
    (
        "policy_training_tokens_per_sec_per_gpu",
        "token/s/device",
        "total_num_tokens / policy_training time / training devices.",
        _RATE,
    ),
    (
        "policy_and_reference_logprobs_tokens_per_sec_per_gpu",
        "token/s/device",
        "total_num_tokens / policy_and_reference_logprobs time / training devices. One count of the tokens, also when "
        "both policy and reference see them. 0 when the step needs no log-probabilities.",
        _RATE,
    ),
    (
        "generation_tokens_per_sec_per_gpu",
        "token/s/device",
        "total_num_tokens / generation time / generation devices. Of groups that dynamic sampling dropped, the time "
        "counts and the tokens do not.",
        _RATE,
    ),
    (
        "train_flops_per_gpu",
        "FLOP/s/device",
        "Model FLOPs of forward and backward over the step's samples / policy_training time / training devices: causal "
        "attention, active experts, no router, nothing for recomputation. Not logged for models of unknown shape.",
        _RATE,
    ),
)

_TRAIN = (
    ("reward", "1", "Reward as the environment gave it, before scaling and penalties.", _SAMPLES),
    ("loss", "1", "The loss that is minimised: policy_loss + reference_policy_kl_penalty x kl_penalty.", _LOSS),
    ("policy_loss", "1", "Clipped surrogate, weighted by the importance correction when it is on.", _LOSS),
    ("kl_penalty", "nat", "KL estimate against the reference, before its weight; 0 without a reference.", _LOSS),
    (
        "grad_norm",
        "1",
        "L2 norm of the gradient over all parameters, before clipping.",
        "update mean",
    ),
    ("lr", "1", "Learning rate of the last optimizer step.", "last update"),
    (
        "skipped_steps",
        "update",
        "Optimizer steps that changed nothing, because the loss or a gradient was not finite, or no token counted.",
        _COUNT,
    ),
    (
        "gen_kl_error",
        "nat",
        "e^d - 1 - d with d = trainer's less generator's log-probability of each sampled token: estimates "
        "KL(generator || trainer). 0 when both agree.",
        _TOKENS,
    ),
    (
        "policy_kl_error",
        "nat",
        "The same with -d. Both are taken on the generator's tokens.",
        _TOKENS,
    ),
    (
        "js_divergence_error",
        "nat",
        "Mean of the same estimator from trainer and from generator to the mean of both: estimates their "
        "Jensen-Shannon divergence.",
        _TOKENS,
    ),
    (
        "token_mult_prob_error",
        "1",
        "e^|d|: the factor between trainer's and generator's probability. 1 when both agree.",
        _TOKENS,
    ),
    (
        "router_agreement",
        "1",
        "Share of (token, layer) pairs in which the trainer's router would choose the recorded set of experts itself, "
        "given what the layers before did. Under replay those went through the recorded experts; with measure_only "
        "through the trainer's own, as without replay. Of all tokens with a recorded route, prompts included (a shared "
        "one once), in layers with experts. Only with router replay.",
        "update mean",
    ),
    ("probs_ratio", "1", "Current over previous probability, as the loss uses it.", _TOKENS),
    ("probs_ratio_clamped", "1", "The ratio after clipping to 1 - ratio_clip_min .. 1 + ratio_clip_max.", _TOKENS),
    ("probs_ratio_max", "1", "Largest ratio.", "largest"),
    ("probs_ratio_min", "1", "Smallest ratio.", "smallest"),
    ("clip_fraction", "1", "Share of tokens whose gradient a clip took away.", _TOKENS),
    (
        "sampling_importance_ratio",
        "1",
        "Weight of the importance correction: e^(previous less generator's log-probability), truncated as the recipe "
        "says. Logged also when the correction is off.",
        "token mean; sample mean with sequence-level ratios",
    ),
    ("importance_out_of_bounds", "1", "Share of tokens whose importance weight lay outside the bounds.", _TOKENS),
    ("approx_entropy", "nat", "Entropy of the policy's distribution over the vocabulary.", _TOKENS),
    (
        "empty_microbatches",
        "micro-batch",
        "Micro-batches without a token in the loss.",
        "sum over ranks, then update mean",
    ),
    ("mean_tokens_per_sample", "token", "Prompt and response tokens of a sample.", _SAMPLES),
    ("truncated_fraction", "1", "Share of responses cut at the length limit.", _SAMPLES),
    (
        "zero_std_fraction",
        "1",
        "Share of groups whose rewards are all equal, which teach nothing; of all sampled ones with dynamic sampling.",
        "group mean",
    ),
    (
        "trajectory_age_max",
        "version",
        "Version of the weights that were trained less the version that sampled the oldest sample; 0 in the sync "
        "placement.",
        "largest",
    ),
    (
        "weight_version",
        "version",
        "Version of the weights that sampled the newest sample; 1 at the start.",
        "largest",
    ),
    (
        "updated_in_flight_fraction",
        "1",
        "Share of samples that more than one version of the weights sampled; 0 unless weights are updated in flight.",
        _SAMPLES,
    ),
    ("reward_errors", "sample", "Samples whose verifier raised or crashed; they score 0.", _COUNT),
    ("reward_timeouts", "sample", "Samples whose verifier ran past its limit and was killed; they score 0.", _COUNT),
    ("dynamic_sampling_batches", "batch", "Generation batches of the step. With dynamic sampling only.", _COUNT),
    ("dynamic_sampling_groups", "group", "Groups sampled. With dynamic sampling only.", _COUNT),
    ("dynamic_sampling_equal_groups", "group", "Groups dropped for equal rewards. With dynamic sampling only.", _COUNT),
    (
        "dynamic_sampling_surplus_groups",
        "group",
        "Groups dropped because the batch was full. With dynamic sampling only.",
        _COUNT,
    ),
)

_POLICY = (
    ("num_microbatches", "micro-batch", "Training micro-batches of one data-parallel rank.", _COUNT),
    ("num_optimizer_steps", "update", "Optimizer steps.", _COUNT),
    (
        "padding_fraction",
        "1",
        "Share of padding in what training put through the model; a shared prompt counts once.",
        _RATE,
    ),
    (
        "memory_peak_gib",
        "GiB",
        "Most memory that a policy worker has held so far: allocated on the GPU, or resident memory in a CPU run.",
        "largest",
    ),
)

_VALIDATION = (
    ("accuracy", "1", "Reward of the validation samples.", _SAMPLES),
    ("accuracy/<env>", "1", "The same for each environment that scored some, by its key under `env`.", _SAMPLES),
    ("num_samples", "sample", "Validation samples.", _COUNT),
    ("reward_errors", "sample", "Samples whose verifier raised or crashed; they score 0.", _COUNT),
    ("reward_timeouts", "sample", "Samples whose verifier ran past its limit and was killed; they score 0.", _COUNT),
)

METRICS: tuple[Metric, ...] = (
    *(Metric(f"train/{name}", unit, text, reducer) for name, unit, text, reducer in _TRAIN),
    *(Metric(f"policy/{name}", unit, text, reducer) for name, unit, text, reducer in _POLICY),
    *(Metric(f"validation/{name}", unit, text, reducer) for name, unit, text, reducer in _VALIDATION),
    *(Metric(f"timing/train/{name}", "s", text, _CLOCK) for name, text in _TIMING),
    *(Metric(f"performance/{name}", unit, text, reducer) for name, unit, text, reducer in _PERFORMANCE),
)


def find(name: str) -> Metric | None:
    """The definition of a logged name; None when there is none."""
    for metric in METRICS:
        family = metric.name.endswith(">")
        prefix = metric.name.partition("<")[0]
        if metric.name == name or (family and name.startswith(prefix) and len(name) > len(prefix)):
            return metric
    return None


def assert_known(names: Iterable[str]) -> None:
    """Raises an AssertionError that lists the names without a definition, each with its nearest defined name."""
    unknown = [name for name in names if find(name) is None]
    if unknown:
        known = [metric.name for metric in METRICS]
        lines = [
            f"  {name} (nearest: {', '.join(difflib.get_close_matches(name, known, 1)) or '-'})" for name in unknown
        ]
        raise AssertionError("metrics without a definition in tracking/definitions.py:\n" + "\n".join(lines))


def markdown() -> str:
    """The text of docs/metrics.md."""
    parts = [_INTRODUCTION]
    for group, metrics in groupby(METRICS, key=lambda metric: metric.group):
        rows = [
            f"| `{m.name}` | {m.unit} | {m.definition.replace('|', chr(92) + '|')} | {m.reducer} |" for m in metrics
        ]
        head = ["| name | unit | definition | reducer |", "|---|---|---|---|"]
        parts.append("\n".join([f"## {group}/", "", *head, *rows]))
    return "\n\n".join(parts) + "\n"


_INTRODUCTION = """\
# Metrics

Made by `tools/make_metrics_docs.py` from `nemo_rl_moe/tracking/definitions.py`: change it there.

`metrics.jsonl` in the run directory has every metric below, one JSON object a line, with `step` from 1 (0 for a
validation before the first step). Steps may come in any order. A resumed run appends: where a step has two rows, the
later one counts. JSON has no NaN or infinity: such a value is `null`, and its name is in the row's list `nonfinite`.
Weights & Biases and TensorBoard get the same names and values.

A *step* is one round of sampling and training. An *update* is one optimizer step; a step has one for each
`policy.train_global_batch_size` samples, its *global batch*. A *device* is a GPU, or `cluster.cpus_per_device` cores in
a CPU run.

| reducer | how the values of a step become one number |
|---|---|
| token mean | mean over the tokens in the loss of each global batch, then over the step's updates |
| loss mean | the same, or over the samples of each one's token mean with `loss_fn.token_level_loss` off |
| sample mean, group mean | mean over the samples or groups of the step (or validation) |
| update mean, last update | mean over the updates of the step, or the value of the last |
| sum, largest, smallest | over the step |
| quotient | one division of the step's totals |

No mean is a mean of means of unequal parts: sums are added over micro-batches and ranks and divided once, by the count
of the global batch.

Rates divide by the devices that did the work: training and log-probabilities by the trainer's, generation by the
generator's, end to end by all. When trainer and generator are colocated, all three are the same. A rate is 0 in a step
whose phase did not run. Phases are timed by the driver and never overlap, unless generation runs ahead."""
