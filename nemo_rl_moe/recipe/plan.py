"""What a recipe amounts to on its cluster: ranks, devices and batch arithmetic. Nothing is started."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from nemo_rl_moe.recipe.environment import worker_environment
from nemo_rl_moe.recipe.memory.estimate import Memory, UnknownModel, estimate_memory
from nemo_rl_moe.recipe.placement import engine_size, model_parallel_size, split_devices
from nemo_rl_moe.recipe.process_groups import ProcessGroups, process_groups
from nemo_rl_moe.recipe.schema import Recipe


@dataclass(frozen=True)
class PolicyRank:
    """One trainer process: its device, and its place in each parallel dimension."""

    rank: int
    node: int
    device: int
    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class Engine:
    """One vLLM engine: its node (of the first device) and its devices, numbered over all nodes."""

    index: int
    node: int
    devices: tuple[int, ...]


@dataclass(frozen=True)
class BatchArithmetic:
    """Sizes of one GRPO step, in samples unless said otherwise."""

    prompts_per_step: int
    generations_per_prompt: int
    samples_per_step: int
    train_global_batch_size: int
    optimizer_steps_per_step: int
    samples_per_dp_rank: int
    prompts_per_engine: float
    train_microbatch_tokens: int | None
    logprob_microbatch_tokens: int | None
    validation_batches: list[int]


@dataclass(frozen=True)
class Plan:
    """A dry run: world sizes in devices, every rank's place and groups, batch arithmetic, the workers' environment.

    `memory` is None where the model's sizes are not known on this machine; `memory_unknown` then says why.
    """

    device: str
    num_nodes: int
    devices_per_node: int
    colocated: bool
    policy_world: int
    policy_dp: int
    policy_edp: int
    generation_world: int
    engine_size: int
    policy_ranks: list[PolicyRank]
    process_groups: list[ProcessGroups]
    engines: list[Engine]
    batch: BatchArithmetic
    threads_per_worker: int
    environment: dict[str, dict[str, str]]
    memory: Memory | None
    memory_unknown: str | None

    @property
    def policy_bundles(self) -> list[int]:
        """Device of each trainer rank, numbered over all nodes."""
        return [rank.node * self.devices_per_node + rank.device for rank in self.policy_ranks]

    @property
    def generation_bundles(self) -> list[int]:
        """First device of each engine, numbered over all nodes."""
        return [engine.devices[0] for engine in self.engines]

    @property
    def shares_memory(self) -> bool:
        """Whether trainer and generator take turns on the memory of their devices (host memory has room for both)."""
        return self.colocated and self.device == "cuda"

    @property
    def total_devices(self) -> int:
        """Devices of the run: what end-to-end rates are divided by."""
        return self.num_nodes * self.devices_per_node

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON data."""
        return asdict(self)


def plan(recipe: Recipe) -> Plan:
    """Places every process of a recipe that passed the rules and works out its batches."""
    split = split_devices(recipe)
    megatron = recipe.policy.megatron_cfg
    expert_size = (
        megatron.expert_tensor_parallel_size
        * megatron.expert_model_parallel_size
        * megatron.pipeline_model_parallel_size
    )
    dp = len(split.policy) // model_parallel_size(recipe)
    size, per_node = engine_size(recipe), recipe.cluster.gpus_per_node
    engines = [
        Engine(i, split.generation[i * size] // per_node, split.generation[i * size : (i + 1) * size])
        for i in range(len(split.generation) // size)
    ]
    ranks = [_policy_rank(recipe, rank, device, len(split.policy)) for rank, device in enumerate(split.policy)]
    memory, unknown = _memory(recipe)
    return Plan(
        device=recipe.cluster.device,
        num_nodes=recipe.cluster.num_nodes,
        devices_per_node=per_node,
        colocated=recipe.policy.generation.colocated.enabled,
        policy_world=len(split.policy),
        policy_dp=dp,
        policy_edp=len(split.policy) // expert_size,
        generation_world=len(split.generation),
        engine_size=size,
        policy_ranks=ranks,
        process_groups=process_groups(ranks),
        engines=engines,
        batch=_batch(recipe, dp, len(engines)),
        threads_per_worker=recipe.cluster.cpus_per_device if recipe.cluster.device == "cpu" else 1,
        environment={kind: worker_environment(recipe, kind) for kind in ("policy", "generation")},
        memory=memory,
        memory_unknown=unknown,
    )


def _memory(recipe: Recipe) -> tuple[Memory | None, str | None]:
    try:
        return estimate_memory(recipe), None
    except UnknownModel as reason:
        return None, str(reason)


def _policy_rank(recipe: Recipe, rank: int, device: int, world: int) -> PolicyRank:
    """Megatron's default order: tensor fastest, then context, data, pipeline; experts likewise."""
    megatron = recipe.policy.megatron_cfg
    tp, cp = megatron.tensor_model_parallel_size, megatron.context_parallel_size
    etp, ep = megatron.expert_tensor_parallel_size, megatron.expert_model_parallel_size
    stage = world // megatron.pipeline_model_parallel_size
    inner = rank % stage
    return PolicyRank(
        rank=rank,
        node=device // recipe.cluster.gpus_per_node,
        device=device % recipe.cluster.gpus_per_node,
        tp=inner % tp,
        cp=inner // tp % cp,
        dp=inner // (tp * cp),
        pp=rank // stage,
        etp=inner % etp,
        ep=inner // etp % ep,
        edp=inner // (etp * ep),
    )


def _batch(recipe: Recipe, dp: int, num_engines: int) -> BatchArithmetic:
    grpo, policy = recipe.grpo, recipe.policy
    samples = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    packing, length = policy.sequence_packing, policy.max_total_sequence_length
    whole, rest = divmod(grpo.max_val_samples, grpo.val_batch_size)
    return BatchArithmetic(
        prompts_per_step=grpo.num_prompts_per_step,
        generations_per_prompt=grpo.num_generations_per_prompt,
        samples_per_step=samples,
        train_global_batch_size=policy.train_global_batch_size,
        optimizer_steps_per_step=samples // policy.train_global_batch_size,
        samples_per_dp_rank=policy.train_global_batch_size // dp,
        prompts_per_engine=grpo.num_prompts_per_step / num_engines if num_engines else 0.0,
        train_microbatch_tokens=(packing.train_mb_tokens or length * policy.train_micro_batch_size)
        if packing.enabled
        else None,
        logprob_microbatch_tokens=(packing.logprob_mb_tokens or length * policy.logprob_batch_size)
        if packing.enabled
        else None,
        validation_batches=[grpo.val_batch_size] * whole + ([rest] if rest else []),
    )
