"""Virtual time of GRPO steps: sync takes turns on all devices, async generates ahead on devices of its own.

Staleness. Version v is the number of updates that the weights have had; step v trains version v to v + 1. While the
generator holds version g, no more than (g + 1 + max age) x prompts groups are ever admitted: (1 + max age) x prompts at
version 0 and as many as a step trains at each later one. So at most (1 + max age) x prompts are outstanding, and each
can train within max age steps, if every step takes the oldest version that is left: version v - max age, or 0 in the
first steps. Of that version it takes the groups that end first, and nothing is dropped. Filling up a step with groups
of a newer version that end early would break the bound: the older ones would no longer fit into the steps left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nemo_rl_moe.bench.placement.distributions import groups
from nemo_rl_moe.bench.placement.engine import Fleet
from nemo_rl_moe.bench.placement.workload import Workload, phase_seconds


@dataclass(frozen=True)
class Batch:
    """What the simulation needs of a recipe.

    Args:
        prompts: groups of a step.
        group_size: responses of a group.
        devices: devices of the run, all nodes together.
        engine_size: devices of one generation engine.
        max_age: versions that a sample may be behind the step that trains on it.
        in_flight_updates: async: requests are paused during a weight update; off: the update waits for their end.
        response_limit: tokens at which a response is cut.
    """

    prompts: int
    group_size: int
    devices: int
    engine_size: int
    max_age: int
    in_flight_updates: bool
    response_limit: float


@dataclass(frozen=True)
class Steps:
    """What is simulated: `count` steps after `warmup` ones that do not count, with lengths drawn from `seed`."""

    count: int = 20
    warmup: int = 4
    seed: int = 0


DEFAULT_STEPS = Steps()


@dataclass(frozen=True)
class Outcome:
    """Means over the counted steps of one placement; seconds are those of one step.

    Args:
        policy_devices, generation_devices: of each side; sync: all of them, twice.
        step_s: whole step; the sum of the five times that follow.
        exposed_generation_s: generation, and scoring, that training waited for.
        logprob_s, training_s, refit_s, other_s: the other phases of the trainer.
        policy_idle: share of the time that a training device does nothing: neither training (log-probabilities
            included) nor refit nor, in the sync placement, generation.
        generation_idle: share of the time that a generation device has no request in flight, does no refit and, in the
            sync placement, does not train.
        requests_per_device: mean requests in flight on a generation device while its engine has any.
        age_mean, age_max: versions that trained groups were behind the step.
        tokens_per_sec_per_gpu: prompt and response tokens of a step / step_s / all devices.
    """

    policy_devices: int
    generation_devices: int
    step_s: float
    exposed_generation_s: float
    logprob_s: float
    training_s: float
    refit_s: float
    other_s: float
    policy_idle: float
    generation_idle: float
    requests_per_device: float
    age_mean: float
    age_max: int
    tokens_per_sec_per_gpu: float


@dataclass
class _Record:
    """One step: times in seconds, ages of its groups, and generation of a device up to the step's end."""

    end: float
    exposed_s: float
    logprob_s: float
    training_s: float
    refit_s: float
    tokens: float
    ages: list[int]
    busy_s: float
    request_s: float


def simulate_sync(workload: Workload, batch: Batch, steps: Steps = DEFAULT_STEPS) -> Outcome:
    """Colocated: generate on all devices, score, train on all devices, refit.

    Raises:
        UserError: the workload's mean length does not fit the recipe's limit.
    """
    fleet = Fleet(workload.generation, batch.devices // batch.engine_size, batch.engine_size)
    lengths = groups(workload.response_tokens, batch.group_size, batch.response_limit, steps.seed)
    records, now = [_Record(0, 0, 0, 0, 0, 0, [], 0, 0)], 0.0
    for _ in range(steps.warmup + steps.count):
        began, samples = now, [next(lengths) for _ in range(batch.prompts)]
        fleet.submit(((tokens, group) for group, row in enumerate(samples) for tokens in row.tolist()), now)
        while fleet.next_end < np.inf:
            now, _group = fleet.end()
        exposed = now + workload.reward_s - began
        tokens = _tokens(workload, samples)
        logprob = phase_seconds(workload.logprobs, tokens, batch.devices)
        training = phase_seconds(workload.training, tokens, batch.devices)
        refit = workload.refit.colocated_s
        now = began + exposed + logprob + training + refit + workload.other_s
        ages = [0] * batch.prompts
        records.append(_Record(now, exposed, logprob, training, refit, tokens, ages, fleet.busy_s, fleet.request_s))
    return _outcome(workload, batch, records[steps.warmup :], batch.devices, batch.devices)


def simulate_async(workload: Workload, batch: Batch, policy_devices: int, steps: Steps = DEFAULT_STEPS) -> Outcome:
    """Split: the generator runs up to `batch.max_age` versions behind, on the devices that the trainer leaves.

    With `max_age` 0, both sides take turns, each on its own devices.

    Raises:
        UserError: the workload's mean length does not fit the recipe's limit.
    """
    generation_devices = batch.devices - policy_devices
    fleet = Fleet(workload.generation, generation_devices // batch.engine_size, batch.engine_size)
    lengths = groups(workload.response_tokens, batch.group_size, batch.response_limit, steps.seed)
    buffer = _Groups(batch, fleet, lengths)
    records, now, refit = [_Record(0, 0, 0, 0, 0, 0, [], 0, 0)], 0.0, workload.refit.split_s
    for step in range(steps.warmup + steps.count):
        buffer.admit(step, now)
        began = now
        last_end, taken = buffer.take(step, now - workload.reward_s)
        now = max(now, last_end + workload.reward_s)
        tokens = _tokens(workload, [samples for _version, samples in taken])
        logprob = phase_seconds(workload.logprobs, tokens, policy_devices)
        training = phase_seconds(workload.training, tokens, policy_devices)
        exposed = now - began
        now += logprob + training + workload.other_s
        drained = buffer.run(now, drain=not batch.in_flight_updates)
        exposed += drained - now
        fleet.pause(drained, refit)
        now = drained + refit
        ages = [step - version for version, _samples in taken]
        records.append(_Record(now, exposed, logprob, training, refit, tokens, ages, fleet.busy_s, fleet.request_s))
    return _outcome(workload, batch, records[steps.warmup :], policy_devices, generation_devices)


@dataclass
class _Groups:
    """The groups between admission and training.

    Args:
        open: (version, response lengths) by group.
        missing: requests that a group still waits for; groups that have ended are not in it.
        done: groups that have ended and are not trained, by version, in the order of their ends.
    """

    batch: Batch
    fleet: Fleet
    lengths: Iterator[NDArray[np.float64]]
    admitted: int = 0
    open: dict[int, tuple[int, NDArray[np.float64]]] = field(default_factory=dict)
    missing: dict[int, int] = field(default_factory=dict)
    done: dict[int, list[int]] = field(default_factory=dict)

    def admit(self, version: int, now: float) -> None:
        """Starts every group that may start under a version."""
        new = range(self.admitted, (version + 1 + self.batch.max_age) * self.batch.prompts)
        for group in new:
            self.open[group] = (version, next(self.lengths))
            self.missing[group] = self.batch.group_size
        self.fleet.submit(((tokens, group) for group in new for tokens in self.open[group][1].tolist()), now)
        self.admitted = max(self.admitted, new.stop)

    def take(self, step: int, now: float) -> tuple[float, list[tuple[int, NDArray[np.float64]]]]:
        """The groups of a step as (version, lengths), and when the last of them ended."""
        version, last = max(0, step - self.batch.max_age), self.run(now, drain=False)
        done = self.done.setdefault(version, [])
        while len(done) < self.batch.prompts:
            last = self._end()
        taken, self.done[version] = done[: self.batch.prompts], done[self.batch.prompts :]
        return last, [self.open.pop(group) for group in taken]

    def run(self, until: float, *, drain: bool) -> float:
        """Generates up to a time, or with `drain` until no request is left; returns the later of both."""
        while self.fleet.next_end <= until or (drain and self.missing):
            until = max(until, self._end())
        return until

    def _end(self) -> float:
        time, group = self.fleet.end()
        self.missing[group] -= 1
        if not self.missing[group]:
            del self.missing[group]
            self.done.setdefault(self.open[group][0], []).append(group)
        return time


def _tokens(workload: Workload, samples: list[NDArray[np.float64]]) -> float:
    responses = np.concatenate(samples)
    return float(responses.sum()) + workload.prompt_tokens * responses.size


def _outcome(workload: Workload, batch: Batch, records: list[_Record], policy: int, generation: int) -> Outcome:
    """Means over the records after the first, which only says where the counted steps begin."""
    first, last, counted = records[0], records[-1], records[1:]
    elapsed, busy = last.end - first.end, last.busy_s - first.busy_s
    sums = {
        name: sum(getattr(r, name) for r in counted) for name in ("exposed_s", "logprob_s", "training_s", "refit_s")
    }
    policy_work = sums["logprob_s"] + sums["training_s"] + sums["refit_s"]
    generation_work = busy + sums["refit_s"]
    if policy + generation > batch.devices:
        policy_work = generation_work = policy_work + busy
    ages = [age for record in counted for age in record.ages]
    return Outcome(
        policy_devices=policy,
        generation_devices=generation,
        step_s=elapsed / len(counted),
        exposed_generation_s=sums["exposed_s"] / len(counted),
        logprob_s=sums["logprob_s"] / len(counted),
        training_s=sums["training_s"] / len(counted),
        refit_s=sums["refit_s"] / len(counted),
        other_s=workload.other_s,
        # Rounding must not show devices that work all the time as idle by less than nothing.
        policy_idle=max(0.0, 1 - policy_work / elapsed),
        generation_idle=max(0.0, 1 - generation_work / elapsed),
        requests_per_device=(last.request_s - first.request_s) / busy if busy else 0.0,
        age_mean=sum(ages) / len(ages),
        age_max=max(ages),
        tokens_per_sec_per_gpu=sum(r.tokens for r in counted) / elapsed / batch.devices,
    )
