"""Sync, every split, and which is best."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rl_moe.bench.placement.simulate import DEFAULT_STEPS, Batch, Outcome, Steps, simulate_async, simulate_sync
from nemo_rl_moe.bench.placement.splits import batch_of, own_split, possible_splits, required_changes
from nemo_rl_moe.bench.placement.workload import Workload
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.schema import Recipe


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
        splits: the async placements, by training devices; empty when there is no split.
        best: the fastest of them; None when there is none.
        best_unchanged: the fastest that the recipe can take as it is; None when there is none.
        own: the recipe's; None when the recipe is colocated.
    """

    batch: Batch
    sync: Outcome
    splits: list[Split]

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
    if batch.devices % batch.engine_size:
        raise UserError(f"{batch.devices} devices are not a multiple of the engine's {batch.engine_size}")
    splits = [
        Split(simulate_async(workload, batch, policy, steps), policy == own, required_changes(recipe, policy))
        for policy in possible_splits(recipe)
    ]
    return Prediction(batch, simulate_sync(workload, batch, steps), splits)


def predict_own(recipe: Recipe, workload: Workload, steps: Steps = DEFAULT_STEPS) -> Outcome:
    """Simulates the recipe's own placement only.

    Raises:
        UserError: recipe and workload do not fit together.
    """
    batch, own = batch_of(recipe, workload), own_split(recipe)
    return simulate_sync(workload, batch, steps) if own is None else simulate_async(workload, batch, own, steps)


def _fastest(splits: list[Split]) -> Split | None:
    return min(splits, key=lambda split: split.outcome.step_s, default=None)
