"""From a recipe: what is simulated, its own split, and what each other split would ask of it."""

from __future__ import annotations

from nemo_rl_moe.bench.placement.simulate import Batch
from nemo_rl_moe.bench.placement.workload import Workload
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.placement import engine_size, model_parallel_size, split_devices
from nemo_rl_moe.recipe.schema import Recipe


def batch_of(recipe: Recipe, workload: Workload) -> Batch:
    """The recipe's batch, devices and staleness bound.

    Raises:
        UserError: the recipe drops groups, which the simulation does not; or prompts leave no room for responses.
    """
    grpo, policy = recipe.grpo, recipe.policy
    if grpo.use_dynamic_sampling:
        raise UserError(
            "grpo.use_dynamic_sampling: true, but a placement is simulated without dropping groups; "
            "set grpo.use_dynamic_sampling=false and num_prompts_per_step to the prompts that are sampled on average"
        )
    limit = min(policy.generation.max_new_tokens, policy.max_total_sequence_length - workload.prompt_tokens)
    if limit <= 0:
        raise UserError(
            f"prompt_tokens: {workload.prompt_tokens:g} of policy.max_total_sequence_length "
            f"{policy.max_total_sequence_length} leave no token for a response"
        )
    return Batch(
        prompts=grpo.num_prompts_per_step,
        group_size=grpo.num_generations_per_prompt,
        devices=recipe.cluster.num_nodes * recipe.cluster.gpus_per_node,
        engine_size=engine_size(recipe),
        max_age=grpo.async_grpo.max_trajectory_age_steps,
        in_flight_updates=grpo.async_grpo.in_flight_weight_updates,
        response_limit=float(limit),
    )


def own_split(recipe: Recipe) -> int | None:
    """Training devices of a split recipe; None for a colocated one.

    Raises:
        UserError: the split leaves devices without work.
    """
    if recipe.policy.generation.colocated.enabled:
        return None
    split, devices = split_devices(recipe), recipe.cluster.num_nodes * recipe.cluster.gpus_per_node
    used = len(split.policy) + len(split.generation)
    if used < devices:
        raise UserError(
            f"policy.generation.colocated.resources: trainer and generator use {used} devices, expected all {devices}"
        )
    return len(split.policy)


def possible_splits(recipe: Recipe) -> list[int]:
    """Training devices of every split that leaves whole copies of the policy and whole engines on its sides."""
    devices = recipe.cluster.num_nodes * recipe.cluster.gpus_per_node
    copy, engine = model_parallel_size(recipe), engine_size(recipe)
    return [policy for policy in range(copy, devices, copy) if (devices - policy) % engine == 0]


def required_changes(recipe: Recipe, policy_devices: int) -> list[str]:
    """What must change in the recipe, besides its placement, for a split; empty when it can be run as it is."""
    cluster, megatron = recipe.cluster, recipe.policy.megatron_cfg
    changes = []
    if cluster.num_nodes > 1 and policy_devices % cluster.gpus_per_node:
        changes.append(f"each side needs whole nodes of {cluster.gpus_per_node} devices")
    experts = (
        megatron.expert_model_parallel_size
        * megatron.expert_tensor_parallel_size
        * megatron.pipeline_model_parallel_size
    )
    if policy_devices % experts:
        changes.append(f"expert layout of {experts} ranks (EP x ETP x PP) does not divide {policy_devices} devices")
    dp, batch = policy_devices // model_parallel_size(recipe), recipe.policy.train_global_batch_size
    if batch % dp:
        changes.append(f"train_global_batch_size {batch} is not a multiple of DP {dp}")
    nodes = policy_devices // cluster.gpus_per_node
    if cluster.segment_size and any(n % cluster.segment_size for n in (nodes, cluster.num_nodes - nodes)):
        changes.append(f"segments of {cluster.segment_size} nodes do not divide the nodes of each side")
    return changes
