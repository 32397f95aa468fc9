"""Sync, every split, and which is best."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nemo_rl_moe.bench.placement.simulate import DEFAULT_STEPS, Batch, Outcome, Steps, simulate_async, simulate_sync
from nemo_rl_moe.bench.placement.splits import batch_of, own_split, possible_splits, required_changes
from nemo_rl_moe.bench.placement.workload import Workload
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.schema import Recipe

# The step time changes smoothly between neighbouring splits, so about this many show where it is least.
_SPREAD = 32


@dataclass(frozen=True)
class Split:
    """An async placement.

    Args:
        outcome: what was simulated.
        is_recipe: the split is the recipe's own.
        changes: what the recipe would need besides another placement, one sentence each.
    """

    outcome: Outcome
    is_recipe: bool
    changes: list[str]


@dataclass(frozen=True)
class Prediction:
    """Every placement of one recipe's devices.

    Args:
        batch: what was simulated of the recipe.
        sync: the colocated placement.
        splits: the async placements, by training devices; empty when there is no split. Of very many, those that the
            recipe can take and some evenly spread ones.
        skipped: splits between those, which were not simulated.
        best: the fastest of them; None when there is none.
        best_unchanged: the fastest that the recipe can take as it is; None when there is none.
        own: the recipe's; None when the recipe is colocated.
    """

    batch: Batch
    sync: Outcome
    splits: list[Split]
    skipped: int

    @property
    def best(self) -> Split | None:
        return _fastest(self.splits)

    @property
    def best_unchanged(self) -> Split | None:
        return _fastest([split for split in self.splits if not split.changes])

    @property
    def own(self) -> Split | None:
        return next((split for split in self.splits if split.is_recipe), None)


def predict(recipe: Recipe, workload: Workload, steps: Steps = DEFAULT_STEPS) -> Prediction:
    """Simulates the recipe's batch in the sync placement and at every split of its devices.

    Raises:
        UserError: recipe and workload do not fit together.
    """
    batch, own = batch_of(recipe, workload), own_split(recipe)
    steps = _warm(steps, batch)
    if batch.devices % batch.engine_size:
        raise UserError(f"{batch.devices} devices are not a multiple of the engine's {batch.engine_size}")
    changes = {policy: required_changes(recipe, policy) for policy in possible_splits(recipe)}
    spread = list(changes)[:: max(1, len(changes) // _SPREAD)]
    splits = [
        Split(simulate_async(workload, batch, policy, steps), policy == own, needed)
        for policy, needed in changes.items()
        if policy in spread or policy == own or not needed
    ]
    return Prediction(batch, simulate_sync(workload, batch, steps), splits, len(changes) - len(splits))


def predict_own(recipe: Recipe, workload: Workload, steps: Steps = DEFAULT_STEPS) -> Outcome:
    """Simulates the recipe's own placement only.

    Raises:
        UserError: recipe and workload do not fit together.
    """
    batch, own = batch_of(recipe, workload), own_split(recipe)
    steps = _warm(steps, batch)
    return simulate_sync(workload, batch, steps) if own is None else simulate_async(workload, batch, own, steps)


def _warm(steps: Steps, batch: Batch) -> Steps:
    """The first max age steps train on younger groups than all later ones: they do not count either."""
    return replace(steps, warmup=steps.warmup + batch.max_age)


def _fastest(splits: list[Split]) -> Split | None:
    return min(splits, key=lambda split: split.outcome.step_s, default=None)
