"""Points against the GPU's memory and the cost model: which are worth running, and in which order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from nemo_rl_moe.bench.cost.job import ModelSizes
from nemo_rl_moe.bench.cost.recipe_job import model_sizes, recipe_job, recipe_system
from nemo_rl_moe.bench.cost.step import StepTime, step_time
from nemo_rl_moe.bench.references.table import System
from nemo_rl_moe.bench.sweep.expand import BASE, InvalidPoint, Point, Sweep
from nemo_rl_moe.recipe.memory.estimate import KnownModel, Phase, UnknownModel, estimate_memory, known_model
from nemo_rl_moe.recipe.memory.gpus import GIB
from nemo_rl_moe.recipe.schema import Recipe


@dataclass(frozen=True)
class Candidate:
    """A point that keeps every rule.

    Args:
        memory: its fullest GPU; None where the model's sizes are not known.
        fits: `fits`, `tight` (only without all of the overhead), `too large`, or `unknown`.
        step: its predicted step; None where the machine or the model is not known.
    """

    point: Point
    memory: Phase | None
    fits: str
    step: StepTime | None

    @property
    def reason(self) -> str | None:
        """Why it is dropped; None where it is not."""
        if self.fits != "too large" or self.memory is None:
            return None
        low = (self.memory.total + self.memory.overhead[0]) / GIB
        return f"memory: {low:.1f} GiB with the least overhead on pipeline stage {self.memory.stage}"


@dataclass(frozen=True)
class Ranking:
    """A sweep's points in the order in which they are worth running.

    Args:
        base: the recipe itself, wherever it ranks.
        kept: points that keep the rules and fit, the fastest prediction first; unknown ones keep the file's order.
        dropped: the others, with their reasons.
        seconds: time that all this took.
    """

    base: Candidate
    kept: list[Candidate]
    dropped: list[tuple[Point, list[str]]]
    seconds: float


def rank(sweep: Sweep) -> Ranking:
    """Checks and ranks all points.

    Raises:
        UserError: benchmark.system is unknown.
    """
    began = time.perf_counter()
    base_recipe = sweep.loaded.recipe
    judge = _Judge(recipe_system(base_recipe), model_sizes(base_recipe), _known(base_recipe))
    base: Candidate | None = None
    kept, dropped = [], []
    for point in sweep.points():
        try:
            candidate = judge.candidate(point, sweep.recipe(point), sweep.memory_key(point))
        except InvalidPoint as invalid:
            dropped.append((point, invalid.reasons))
            continue
        if point.name == BASE:
            base = candidate
        elif candidate.reason is not None:
            dropped.append((point, [candidate.reason]))
        else:
            kept.append(candidate)
    assert base is not None
    # Of equal speed: what fits for certain first, then the smaller change.
    kept.sort(key=lambda c: (c.step.seconds / c.step.tokens if c.step else 0, c.fits != "fits", len(c.point.changes)))
    return Ranking(base, kept, dropped, time.perf_counter() - began)


def _known(recipe: Recipe) -> KnownModel | None:
    try:
        return known_model(recipe.policy)
    except UnknownModel:
        return None


@dataclass(frozen=True)
class _Judge:
    """What all points of a sweep share. A sweep's points train one model on one kind of GPU."""

    system: System | None
    sizes: ModelSizes | None
    model: KnownModel | None
    memories: dict[str, Phase] = field(default_factory=dict)

    def candidate(self, point: Point, recipe: Recipe, memory_key: str) -> Candidate:
        step = None
        if self.system is not None and self.sizes is not None:
            step = step_time(recipe_job(recipe, self.sizes, self.system))
        if self.model is None:
            return Candidate(point, None, "unknown", step)
        fullest = self.memories.get(memory_key)
        if fullest is None:
            phases = estimate_memory(recipe, self.model).phases
            fullest = max((p for p in phases if p.name == "training"), key=lambda p: p.total)
            self.memories[memory_key] = fullest
        return Candidate(point, fullest, fullest.verdict, step)


def gains(ranking: Ranking) -> Iterator[tuple[Candidate, float | None]]:
    """Kept points with their predicted speed over the base's: 1.1 is 10 % more tokens a second and GPU."""
    base = ranking.base.step
    for candidate in ranking.kept:
        step = candidate.step
        yield (
            candidate,
            None
            if base is None or step is None
            else (step.tokens / step.gpus / step.seconds) / (base.tokens / base.gpus / base.seconds),
        )
