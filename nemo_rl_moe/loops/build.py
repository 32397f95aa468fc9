"""The parts of a run from its recipe: workers placed, set up side by side, checked, wired together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from ray.util.placement_group import PlacementGroup

from nemo_rl_moe.cluster.worker_group import WorkerGroup, WorkerSpec
from nemo_rl_moe.generation.generator import Generator
from nemo_rl_moe.policy.policy import Policy
from nemo_rl_moe.recipe.environment import worker_environment
from nemo_rl_moe.recipe.plan import Plan
from nemo_rl_moe.recipe.schema import Recipe

POLICY_WORKER = "nemo_rl_moe.policy.worker.PolicyWorker"
GENERATION_WORKER = "nemo_rl_moe.generation.vllm_worker.VllmWorker"
ASYNC_GENERATION_WORKER = "nemo_rl_moe.generation.async_vllm_worker.AsyncVllmWorker"


def start_workers(
    stack: contextlib.ExitStack,
    recipe: Recipe,
    layout: Plan,
    placement: PlacementGroup,
    log_dir: Path,
    on_event: Callable[[str], None],
) -> tuple[Policy, Generator]:
    """Starts both worker groups and sets them up; the stack ends their processes.

    Raises:
        Exception: the first that either set-up raised; both groups have been ended.
    """
    plain = recipe.model_dump(mode="json")
    policy_workers = _group(stack, "policy", POLICY_WORKER, recipe, layout.policy_bundles, placement, log_dir, plain)
    in_flight = recipe.policy.generation.vllm_cfg.async_engine
    engine = ASYNC_GENERATION_WORKER if in_flight else GENERATION_WORKER
    generation_workers = _group(
        stack, "generation", engine, recipe, layout.generation_bundles, placement, log_dir, plain
    )
    policy, generator = Policy(policy_workers, recipe), Generator(generation_workers, recipe, on_event)
    set_up(policy, generator, [policy_workers, generation_workers], in_turn=layout.shares_memory)
    return policy, generator


def set_up(policy: Policy, generator: Generator, groups: Sequence[WorkerGroup], *, in_turn: bool) -> None:
    """Sets both sides up: at the same time, or in turn where they share the memory of a device.

    vLLM sizes its cache by the memory that is free while it starts, so a shared device must be its own until then.
    """
    if in_turn:
        generator.setup()
        generator.sleep()
        policy.setup()
    else:
        # Both spend most of their start-up importing and reading files, so they wait better together.
        side_by_side([policy.setup, generator.setup], groups)


def side_by_side(setups: Sequence[Callable[[], object]], groups: Sequence[WorkerGroup]) -> None:
    """Runs all set-ups at the same time.

    The first error, or an interrupt, ends all groups. Leaving the pool joins its threads, which would otherwise go on
    waiting for workers of a run that is over, for `cluster.timeouts.setup_s` in the worst case.
    """
    with ThreadPoolExecutor(len(setups)) as pool:
        try:
            done, _ = wait([pool.submit(setup) for setup in setups], return_when=FIRST_EXCEPTION)
            for ready in done:
                ready.result()
        except BaseException:
            for group in groups:
                group.kill()
            raise


def _group(
    stack: contextlib.ExitStack,
    name: str,
    class_path: str,
    recipe: Recipe,
    bundles: list[int],
    placement: PlacementGroup,
    log_dir: Path,
    plain: dict[str, Any],
) -> WorkerGroup:
    kind = "policy" if name == "policy" else "generation"
    # Colocated actors share a device in turns, so each books half of it.
    share = 0.5 if recipe.policy.generation.colocated.enabled else 1.0
    on_gpu = recipe.cluster.device == "cuda"
    cpus = share * (1 if on_gpu else recipe.cluster.cpus_per_device)
    tail = (len(bundles),) if name == "policy" else ()
    specs = [
        WorkerSpec(bundle, cpus, share if on_gpu else 0.0, (plain, rank, *tail)) for rank, bundle in enumerate(bundles)
    ]
    concurrent = class_path == ASYNC_GENERATION_WORKER
    environment = worker_environment(recipe, kind)
    group = WorkerGroup(name, class_path, specs, placement, environment, log_dir, concurrent=concurrent)
    stack.callback(group.kill)
    return group
