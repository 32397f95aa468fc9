"""Recipe -> running parts -> driver -> exit code."""

from __future__ import annotations

import contextlib
from pathlib import Path

from nemo_rl_moe import interrupts
from nemo_rl_moe.bench.flops.models import recipe_flops
from nemo_rl_moe.cluster.ray_cluster import check_resources, ray_session, reserve_devices
from nemo_rl_moe.data.datasets import load_prompts
from nemo_rl_moe.data.loader import PromptLoader
from nemo_rl_moe.data.tokenizer import load_tokenizer
from nemo_rl_moe.environments.pool import VerifierPool
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.loops import async_one_off, checkpointing, sync
from nemo_rl_moe.loops.build import start_workers
from nemo_rl_moe.loops.components import Data, Run
from nemo_rl_moe.loops.health import HealthGate
from nemo_rl_moe.loops.saved_state import SavedState
from nemo_rl_moe.policy.megatron.hf_files import model_folder
from nemo_rl_moe.policy.megatron.stored_tensors import check_model_folder
from nemo_rl_moe.recipe.load import LoadedRecipe
from nemo_rl_moe.recipe.plan import plan
from nemo_rl_moe.recipe.schema import Recipe
from nemo_rl_moe.refit.synchronizer import WeightSynchronizer
from nemo_rl_moe.tracking.run_dir import RunDirectory
from nemo_rl_moe.tracking.timers import PhaseTimer
from nemo_rl_moe.tracking.tracker import Tracker

EXIT_DONE, EXIT_FAILED, EXIT_USER, EXIT_INTERRUPTED = 0, 1, 2, interrupts.EXIT_INTERRUPTED


def run_recipe(loaded: LoadedRecipe, *, resume: bool) -> int:
    """Runs a recipe to its end.

    Tokenizer, prompts, the model's files, verifiers and the cluster's resources are checked before the run directory is
    made, so that a user's mistake in them leaves nothing behind.

    Args:
        loaded: the checked recipe.
        resume: go on from the newest complete checkpoint; without one the run starts at step 1.

    Returns:
        0 done, 130 interrupted.

    Raises:
        UserError: the user's input is wrong.
        Exception: the run failed; the run directory's manifest says why.
    """
    recipe = loaded.recipe
    data = load_data(recipe)
    check_model_folder(recipe.policy.model_name, recipe.policy.hf_config_overrides)
    root = checkpointing.checkpoint_root(recipe, loaded.run_dir)
    nothing_to_resume = resume and not checkpointing.complete_checkpoints(root)
    resume = resume and not nothing_to_resume
    saved = checkpointing.newest(root) if resume else None
    if saved is None:
        checkpointing.refuse_foreign(recipe, root)
    code, reason, tracker = EXIT_FAILED, "failed", None
    with contextlib.ExitStack() as stack, interrupts.raised():
        verifiers = stack.enter_context(VerifierPool(recipe.env))
        stack.enter_context(ray_session(recipe.cluster))
        check_resources(recipe.cluster)
        try:
            with interrupts.held():  # A run directory is there with its record or not at all.
                directory = RunDirectory.open(loaded, resume=resume)
                tracker = Tracker(directory, loaded)
            verifiers.log_to(directory.path / "logs")
            tracker.start_backends()
            if nothing_to_resume:
                tracker.event("there is no complete checkpoint to resume from: starting at step 1")
            _run(loaded, data, verifiers, tracker, directory, stack, saved)
            code, reason = EXIT_DONE, "done"
        except KeyboardInterrupt:
            code, reason = EXIT_INTERRUPTED, "interrupted"
        except Exception as error:
            code = EXIT_USER if isinstance(error, UserError) else EXIT_FAILED
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            # Before the stack ends the workers: Ray may be gone, and the record must not wait for it.
            if tracker is not None:
                tracker.close(code, reason)
    return code


def load_data(recipe: Recipe) -> Data:
    """Tokenizer, training prompts in their order, and validation prompts."""
    tokenizer = load_tokenizer(recipe.policy)
    grpo = recipe.grpo
    prompts = load_prompts(recipe, "train", tokenizer)
    loader = PromptLoader(prompts, grpo.num_prompts_per_step, grpo.seed, recipe.data.shuffle, grpo.max_num_epochs)
    return Data(tokenizer, loader, load_prompts(recipe, "validation", tokenizer))


def _run(
    loaded: LoadedRecipe,
    data: Data,
    verifiers: VerifierPool,
    tracker: Tracker,
    directory: RunDirectory,
    stack: contextlib.ExitStack,
    saved: tuple[Path, SavedState] | None,
) -> None:
    """Starts the workers, which the stack will end, wires the parts together and hands them to the driver.

    `saved` is the checkpoint to go on from.
    """
    recipe, layout = loaded.recipe, plan(loaded.recipe)
    placement = stack.enter_context(reserve_devices(recipe.cluster))
    tracker.event(f"starting {len(layout.policy_ranks)} policy rank(s) and {len(layout.engines)} engine(s)")
    policy, generator = start_workers(stack, recipe, layout, placement, directory.path / "logs", on_event=tracker.event)
    synchronizer = WeightSynchronizer(policy, generator)
    stack.callback(synchronizer.close)
    run = Run(
        recipe=recipe,
        plan=layout,
        policy=policy,
        generator=generator,
        synchronizer=synchronizer,
        verifiers=verifiers,
        data=data,
        tracker=tracker,
        timer=PhaseTimer(on_phase=tracker.phase),
        run_dir=directory.path,
        health=HealthGate(recipe.grpo.token_mult_prob_error_warning),
        # The folder, which a hub id has in the local cache by now.
        flops=recipe_flops(recipe.policy, model_folder(recipe.policy.model_name)),
    )
    if saved is not None:
        checkpointing.resume(run, *saved)
    driver = async_one_off if recipe.grpo.async_grpo.enabled else sync
    driver.train(run)
