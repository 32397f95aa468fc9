"""Recipe -> running parts -> driver -> exit code."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ray.util.placement_group import PlacementGroup

from nemo_rl_moe.cluster.ray_cluster import ray_session, reserve_devices
from nemo_rl_moe.cluster.worker_group import WorkerGroup, WorkerSpec
from nemo_rl_moe.data.datasets import load_prompts
from nemo_rl_moe.data.loader import PromptLoader
from nemo_rl_moe.data.tokenizer import load_tokenizer
from nemo_rl_moe.environments.pool import VerifierPool
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.generation.generator import Generator
from nemo_rl_moe.loops import checkpointing, sync
from nemo_rl_moe.loops.components import Run
from nemo_rl_moe.policy.policy import Policy
from nemo_rl_moe.recipe.environment import worker_environment
from nemo_rl_moe.recipe.load import LoadedRecipe
from nemo_rl_moe.recipe.plan import Plan, plan
from nemo_rl_moe.recipe.schema import Recipe
from nemo_rl_moe.refit.synchronizer import WeightSynchronizer
from nemo_rl_moe.tracking.run_dir import RunDirectory
from nemo_rl_moe.tracking.timers import PhaseTimer
from nemo_rl_moe.tracking.tracker import Tracker

EXIT_DONE, EXIT_FAILED, EXIT_USER, EXIT_INTERRUPTED = 0, 1, 2, 130


def run_recipe(loaded: LoadedRecipe, *, resume: bool) -> int:
    """Runs a recipe to its end. Returns the exit code; a user's mistake is raised as UserError.

    Prompts and tokenizer are read before anything is written or started, so that their errors leave nothing behind.
    """
    recipe = loaded.recipe
    layout = plan(recipe)
    tokenizer = load_tokenizer(recipe.policy)
    train_prompts = load_prompts(recipe.data, "train", tokenizer, recipe)
    validation_prompts = load_prompts(recipe.data, "validation", tokenizer, recipe)
    loader = PromptLoader(
        train_prompts,
        recipe.grpo.num_prompts_per_step,
        recipe.grpo.seed,
        recipe.data.shuffle,
        recipe.grpo.max_num_epochs,
    )
    with _sigterm_as_interrupt(), contextlib.ExitStack() as stack:
        stack.enter_context(ray_session(recipe.cluster))
        placement = stack.enter_context(reserve_devices(recipe.cluster))
        run_dir = RunDirectory.open(loaded, resume=resume)
    return EXIT_DONE
