"""Recipes that break one rule each, and recipes at the rules' edges that break none.

A mutation is a valid recipe with a few keys laid over it; the problem it causes, and the key to blame, are part of it.
"""

from tests.unit.recipes.mutations import batches, dispatch, objective, parallelism, training
from tests.unit.recipes.mutations.base import Mutation

MUTATIONS = [
    *parallelism.LAYOUT,
    *parallelism.PLACEMENT,
    *batches.BATCHES,
    *batches.CHECKPOINTS,
    *objective.OBJECTIVE,
    *objective.ENGINE,
    *objective.NAMING,
    *dispatch.DISPATCH,
    *training.TRAINER,
    *training.PRECISION,
    *training.REPLAYS,
    *training.BENCHMARK,
]
VALID = [*parallelism.VALID, *batches.VALID, *objective.VALID, *dispatch.VALID, *training.VALID]

__all__ = ["MUTATIONS", "VALID", "Mutation"]
