"""The `performance/*` metrics of a step. Rates divide by the devices that did the work; end to end, by all of them."""

from __future__ import annotations

from collections.abc import Mapping


def throughput(
    total_tokens: int,
    timing: Mapping[str, float],
    training_devices: int,
    generation_devices: int,
    all_devices: int,
    *,
    train_flops: float | None = None,
) -> dict[str, float]:
    """Rates of one step.

    Args:
        total_tokens: unpadded prompt and response tokens of the step's samples.
        timing: `PhaseTimer.step()`.
        training_devices: devices of the trainer; they do training and log-probabilities.
        generation_devices: devices of the generator.
        all_devices: devices of the run. Colocated: all three are the same.
        train_flops: model FLOPs of training on the step's samples (`bench.flops.count.training_flops`); None where the
            model's shape is not known, which leaves `train_flops_per_gpu` out.

    Returns:
        Tokens (or FLOPs) per second and device under `performance/`; 0 for a phase that did not run in the step.

    Raises:
        ValueError: a number of devices is not positive.
    """
    if min(training_devices, generation_devices, all_devices) < 1:
        raise ValueError(f"devices must be positive, got {training_devices}, {generation_devices}, {all_devices}")

    def rate(amount: float, phase: str, devices: int) -> float:
        seconds = timing.get(f"timing/train/{phase}", 0.0)
        return amount / seconds / devices if seconds > 0 else 0.0

    logprobs = "policy_and_reference_logprobs"
    rates = {
        "total_num_tokens": float(total_tokens),
        "tokens_per_sec_per_gpu": rate(total_tokens, "total_step_time", all_devices),
        "policy_training_tokens_per_sec_per_gpu": rate(total_tokens, "policy_training", training_devices),
        f"{logprobs}_tokens_per_sec_per_gpu": rate(total_tokens, logprobs, training_devices),
        "generation_tokens_per_sec_per_gpu": rate(total_tokens, "generation", generation_devices),
    }
    if train_flops is not None:
        rates["train_flops_per_gpu"] = rate(train_flops, "policy_training", training_devices)
    return {f"performance/{name}": value for name, value in rates.items()}
