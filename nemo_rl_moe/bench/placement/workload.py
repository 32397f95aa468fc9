"""What a placement is simulated with: lengths, speeds and times of one step, from a YAML file or a measured run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator

from nemo_rl_moe.bench.typed_file import read_typed
from nemo_rl_moe.recipe.schema.base import Section


class Constant(Section):
    """Every response has the same length."""

    distribution: Literal["constant"]
    """The kind."""
    tokens: PositiveFloat
    """Tokens of each response."""


class Lognormal(Section):
    """Log-normal lengths, cut at the recipe's limit."""

    distribution: Literal["lognormal"]
    """The kind."""
    mean: PositiveFloat
    """Mean tokens after the cut: what a run logs."""
    sigma: PositiveFloat
    """Standard deviation of the logarithm before the cut."""


class Empirical(Section):
    """Lengths drawn from a list, each as likely as the others."""

    distribution: Literal["empirical"]
    """The kind."""
    tokens: list[PositiveFloat] = Field(min_length=1)
    """Observed tokens of responses."""


class GenerationSpeed(Section):
    """Speed of a generation device. With n requests in flight on it, each gets its next token after
    `decode_latency_s + n / peak_tokens_per_second`: bound by latency when n is small, by throughput when it is large.
    """

    decode_latency_s: NonNegativeFloat
    """Seconds of a decode step that do not depend on the number of requests."""
    peak_tokens_per_second: PositiveFloat
    """Tokens per second of one device with very many requests."""
    max_requests: PositiveInt | None = None
    """Requests in flight on one device at most, others wait (key/value cache); null knows no limit."""


class SpeedPoint(Section):
    """Speed of the trainer on a number of devices."""

    devices: PositiveInt
    """Training devices."""
    tokens_per_second_per_device: PositiveFloat
    """Prompt and response tokens per second and device: the run's metric of the phase."""


class RefitTime(Section):
    """Seconds from the end of training until the generator has the new weights."""

    colocated_s: NonNegativeFloat
    """In turns on the same devices: with putting one side to sleep and waking the other."""
    split_s: NonNegativeFloat
    """Between devices of their own; both sides stand still meanwhile."""


class Workload(Section):
    """One step's work, independent of placement."""

    prompt_tokens: NonNegativeFloat = 0.0
    """Mean tokens of a prompt. They are trained on and not generated."""
    response_tokens: Annotated[Constant | Lognormal | Empirical, Field(discriminator="distribution")]
    """Tokens of a response."""
    generation: GenerationSpeed
    """Speed of a generation device."""
    training: list[SpeedPoint] = Field(min_length=1)
    """Speed of policy training at one or more numbers of devices."""
    logprobs: list[SpeedPoint] = Field(default_factory=list)
    """Speed of the log-probabilities, both passes counted as one; empty when the step needs none."""
    refit: RefitTime
    """Time of a weight update."""
    reward_s: NonNegativeFloat = 0.0
    """Seconds from a group's last response until it is scored."""
    other_s: NonNegativeFloat = 0.0
    """Seconds of a step in which the trainer waits for neither side: its share of validation, data, logging."""

    @field_validator("training", "logprobs")
    @classmethod
    def _distinct(cls, points: list[SpeedPoint]) -> list[SpeedPoint]:
        if len({point.devices for point in points}) < len(points):
            raise ValueError("two speeds for the same number of devices")
        return sorted(points, key=lambda point: point.devices)


def phase_seconds(points: list[SpeedPoint], tokens: float, devices: int) -> float:
    """Seconds of a training-side phase over `tokens` tokens on `devices` devices; 0 without points.

    Speed per device is interpolated linearly in log(devices), log(speed) between the points. Outside them it stays that
    of the nearest point, so that time falls as 1 / devices.
    """
    if not points:
        return 0.0
    below = [point for point in points if point.devices <= devices]
    above = [point for point in points if point.devices >= devices]
    low, high = (below or above[:1])[-1], (above or below[-1:])[0]
    speed = low.tokens_per_second_per_device
    if low.devices != high.devices:
        share = math.log(devices / low.devices) / math.log(high.devices / low.devices)
        speed *= (high.tokens_per_second_per_device / speed) ** share
    return tokens / (devices * speed)


def load_workload(path: Path) -> Workload:
    """Reads a workload file.

    Raises:
        UserError: every problem, with file and line, dotted path, value and expectation.
    """
    return read_typed(path, Workload, "workload")[0]
