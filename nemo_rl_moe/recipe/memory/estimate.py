"""The memory of a run: what each kind of device holds in each phase, against its size, and the host's share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_rl_moe.recipe.memory import trainer
from nemo_rl_moe.recipe.memory.engine import EngineMemory, engine_memory
from nemo_rl_moe.recipe.memory.gpus import GIB, gpu_bytes
from nemo_rl_moe.recipe.memory.parameters import ModelParameters, model_parameters
from nemo_rl_moe.recipe.placement import engine_size, model_parallel_size, split_devices
from nemo_rl_moe.recipe.published_models import model_config
from nemo_rl_moe.recipe.schema import PolicyConfig, Recipe

# CUDA context, NCCL's buffers, workspaces of the libraries, and what the allocator cannot use: an assumption, not a
# measurement. A verdict is firm only outside of the band.
OVERHEAD = (3 * GIB, 8 * GIB)


@dataclass(frozen=True)
class Phase:
    """One device in one phase.

    Args:
        name: `training`, `log-probabilities` or `generation`.
        stage: pipeline stage of the trainer; None for an engine.
        terms: bytes by name.
        overhead: lowest and highest bytes of what is not counted.
        verdict: `fits`, `tight` (only without all of the overhead), `too large`, or `unknown` without a size.
    """

    name: str
    stage: int | None
    terms: dict[str, int]
    overhead: tuple[int, int]
    verdict: str

    @property
    def total(self) -> int:
        """Bytes of all terms, overhead left out."""
        return sum(self.terms.values())


@dataclass(frozen=True)
class Memory:
    """Memory of a run.

    Args:
        device_bytes: usable bytes of one GPU; None on a CPU or without cluster.gpu_type.
        parameters: parameters of the model; `exact` says whether they are counted or estimated.
        phases: every phase of every trainer stage, and the engine's.
        cache_tokens: tokens that one engine can cache; None when unknown.
        host_per_node: bytes of host memory on the fullest node, by name.
        problems: what does not fit, in words.
        assumptions: what the numbers take for granted.
    """

    device_bytes: int | None
    parameters: int
    exact: bool
    phases: list[Phase]
    cache_tokens: int | None
    host_per_node: dict[str, int]
    problems: list[str] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)


class UnknownModel(ValueError):
    """The sizes of the recipe's model are not known on this machine; the message says why."""


@dataclass(frozen=True)
class KnownModel:
    """A model whose sizes are known: its config.json and its parameters."""

    config: Mapping[str, Any]
    parameters: ModelParameters


def known_model(policy: PolicyConfig) -> KnownModel:
    """Sizes of a recipe's model.

    Raises:
        UnknownModel: no config.json, or one of a family or with sizes that the count does not know.
    """
    name, config = policy.model_name, model_config(policy)
    if config is None:
        raise UnknownModel(f"{name} is no model folder here, and its sizes are not in the table of published models")
    try:
        parameters = model_parameters(config)
    except KeyError as missing:
        raise UnknownModel(f"config.json of {name} has no {missing}") from None
    if parameters is None:
        raise UnknownModel(f"parameters of the family {config.get('model_type')!r} are not counted")
    return KnownModel(config, parameters)


def estimate_memory(recipe: Recipe, model: KnownModel | None = None) -> Memory:
    """Memory of a recipe that passed the rules.

    Args:
        model: sizes of the recipe's model, where many recipes share one; None looks them up.

    Raises:
        UnknownModel: no config.json, or one of a family or with sizes that the count does not know.
    """
    model = known_model(recipe.policy) if model is None else model
    try:
        return _estimate(recipe, model.config, model.parameters)
    except KeyError as missing:
        raise UnknownModel(f"config.json of {recipe.policy.model_name} has no {missing}") from None


def _estimate(recipe: Recipe, config: Mapping[str, Any], parameters: ModelParameters) -> Memory:
    capacity = gpu_bytes(recipe)
    policy_only = recipe.benchmark.policy_only
    engine = None if policy_only else engine_memory(config, parameters, recipe, capacity)
    states = _states(recipe, parameters)
    phases = [
        phase
        for stage, state in enumerate(states)
        for phase in _trainer_phases(recipe, config, parameters, stage, state, capacity)
    ]
    if engine is not None:
        terms = {"engine weights": engine.weights, "engine working memory": engine.working}
        terms["key/value cache"] = max(engine.cache, 0)
        # What vLLM takes besides is inside its share of the GPU; a trainer on the same GPU leaves its own behind.
        shared = recipe.cluster.device == "cuda" and recipe.policy.generation.colocated.enabled
        overhead = OVERHEAD if shared else (0, 0)
        phases.append(Phase("generation", None, terms, overhead, _verdict(sum(terms.values()), overhead, capacity)))
    return Memory(
        device_bytes=capacity,
        parameters=parameters.total,
        exact=parameters.exact,
        phases=phases,
        cache_tokens=None if engine is None else engine.cache_tokens,
        host_per_node=_host(recipe, parameters, states, engine, max(p.total for p in phases if p.stage is not None)),
        problems=_problems(recipe, phases, engine),
        assumptions=_assumptions(recipe, parameters),
    )


def _states(recipe: Recipe, parameters: ModelParameters) -> list[dict[str, int]]:
    megatron, world = recipe.policy.megatron_cfg, len(split_devices(recipe).policy)
    dp_cp = world // model_parallel_size(recipe) * megatron.context_parallel_size
    shards = megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size
    edp = world // (shards * megatron.pipeline_model_parallel_size)
    return [trainer.state_bytes(rank, recipe, dp_cp, edp) for rank in trainer.rank_parameters(parameters, recipe)]


def _trainer_phases(
    recipe: Recipe,
    config: Mapping[str, Any],
    parameters: ModelParameters,
    stage: int,
    state: dict[str, int],
    capacity: int | None,
) -> list[Phase]:
    megatron = recipe.policy.megatron_cfg
    world = len(split_devices(recipe).policy)
    samples = recipe.policy.train_global_batch_size // (world // model_parallel_size(recipe))
    last = stage == megatron.pipeline_model_parallel_size - 1
    on_device = dict(state)
    if megatron.optimizer.optimizer_cpu_offload:
        on_device["optimizer"] = int(state["optimizer"] * (1 - megatron.optimizer.optimizer_offload_fraction))
    training = on_device | {
        "activations": trainer.activation_bytes(config, parameters, recipe, stage, samples),
        "logits": trainer.logit_bytes(parameters, recipe, training=True) if last else 0,
        "dispatcher": trainer.dispatcher_bytes(config, parameters, recipe),
    }
    phases = [("training", training)]
    if not recipe.benchmark.policy_only:
        phases.append(("log-probabilities", _logprob_terms(recipe, config, parameters, stage, state, on_device)))
    overhead = (0, 0) if recipe.cluster.device == "cpu" else OVERHEAD
    return [
        Phase(name, stage, terms, overhead, _verdict(sum(terms.values()), overhead, capacity)) for name, terms in phases
    ]


def _logprob_terms(
    recipe: Recipe,
    config: Mapping[str, Any],
    parameters: ModelParameters,
    stage: int,
    state: dict[str, int],
    on_device: dict[str, int],
) -> dict[str, int]:
    last = stage == recipe.policy.megatron_cfg.pipeline_model_parallel_size - 1
    return on_device | {
        "reference weights": state["weights"] if _uses_reference(recipe) else 0,
        "activations": trainer.forward_bytes(config, parameters, recipe, stage),
        "logits": trainer.logit_bytes(parameters, recipe, training=False) if last else 0,
        "dispatcher": trainer.dispatcher_bytes(config, parameters, recipe),
    }


def _uses_reference(recipe: Recipe) -> bool:
    return recipe.loss_fn.reference_policy_kl_penalty > 0


def _verdict(total: int, overhead: tuple[int, int], capacity: int | None) -> str:
    if capacity is None:
        return "unknown"
    if total + overhead[0] > capacity:
        return "too large"
    return "tight" if total + overhead[1] > capacity else "fits"


def _host(
    recipe: Recipe,
    parameters: ModelParameters,
    states: list[dict[str, int]],
    engine: EngineMemory | None,
    largest_phase: int,
) -> dict[str, int]:
    """Host memory of a node full of trainer ranks of the largest stage; on a CPU the devices' own memory is in it."""
    cluster, megatron = recipe.cluster, recipe.policy.megatron_cfg
    ranks = min(cluster.gpus_per_node, len(split_devices(recipe).policy))
    largest = max(states, key=lambda state: state["weights"] + state["optimizer"])
    host = {"reference weights": ranks * largest["weights"] if _uses_reference(recipe) else 0}
    if megatron.optimizer.optimizer_cpu_offload:
        fraction = megatron.optimizer.optimizer_offload_fraction
        host["offloaded optimizer"] = int(ranks * largest["optimizer"] * fraction)
    if cluster.device == "cpu":
        itemsize = 4 if recipe.policy.precision == "float32" else 2
        host["trainer"] = ranks * largest_phase
        if not recipe.benchmark.policy_only:
            host["weight transfer buffer"] = parameters.total * itemsize
        if engine is not None:
            engines = len(split_devices(recipe).generation) // engine_size(recipe)
            host["engines"] = engines * (engine.weights + engine.cache)
    elif recipe.policy.generation.colocated.enabled and not recipe.benchmark.policy_only:
        host["trainer while the engine runs"] = ranks * (largest["weights"] + largest["optimizer"])
    return host


def _problems(recipe: Recipe, phases: list[Phase], engine: EngineMemory | None) -> list[str]:
    problems = []
    words = {"too large": "does not fit", "tight": "may not fit"}
    for name in dict.fromkeys(phase.name for phase in phases):
        worst = max((phase for phase in phases if phase.name == name), key=lambda phase: phase.total)
        if worst.verdict in words:
            where = "an engine" if worst.stage is None else f"pipeline stage {worst.stage}"
            size = f"{worst.total / GIB:.1f} GiB before overhead"
            problems.append(f"{worst.name} on {where} {words[worst.verdict]}: {size}")
    wanted = recipe.policy.generation.vllm_cfg.max_model_len or recipe.policy.max_total_sequence_length
    if engine is not None and engine.cache_tokens < wanted:
        problems.append(f"an engine's cache holds {engine.cache_tokens} tokens, fewer than one sequence of {wanted}")
    return problems


def _assumptions(recipe: Recipe, parameters: ModelParameters) -> list[str]:
    notes = ["tokens are spread evenly over the experts, and every row has its full length"]
    if recipe.cluster.device == "cpu":
        notes.append("tensors only: what Python and its libraries take is not counted")
    else:
        notes.append(f"overhead of {OVERHEAD[0] // GIB} to {OVERHEAD[1] // GIB} GiB for CUDA, NCCL and fragmentation")
        if recipe.policy.generation.colocated.enabled and not recipe.benchmark.policy_only:
            notes.append("while the engine runs, the trainer's weights and optimizer state are in host memory")
    if not parameters.exact:
        notes.append("parameters from published sizes, not from a checkpoint")
    if recipe.policy.megatron_cfg.fp8_cfg.enabled:
        notes.append("fp8 training: activations are counted in bfloat16")
    return notes
