"""Rules on the trainer's parallel layout."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_rl_moe.recipe.memory.stages import pipeline_slots
from nemo_rl_moe.recipe.placement import model_parallel_size, split_devices
from nemo_rl_moe.recipe.rules.divisors import near_divisors
from nemo_rl_moe.recipe.rules.registry import Context, Finding, rule

TP = "policy.megatron_cfg.tensor_model_parallel_size"
PP = "policy.megatron_cfg.pipeline_model_parallel_size"
CP = "policy.megatron_cfg.context_parallel_size"
EP = "policy.megatron_cfg.expert_model_parallel_size"
ETP = "policy.megatron_cfg.expert_tensor_parallel_size"
SP = "policy.megatron_cfg.sequence_parallel"
FIRST = "policy.megatron_cfg.num_layers_in_first_pipeline_stage"
LAST = "policy.megatron_cfg.num_layers_in_last_pipeline_stage"
ACCOUNT_EMBEDDING = "policy.megatron_cfg.account_for_embedding_in_pipeline_split"
ACCOUNT_LOSS = "policy.megatron_cfg.account_for_loss_in_pipeline_split"
NODES, PER_NODE = "cluster.num_nodes", "cluster.gpus_per_node"
MODEL = "policy.model_name"


def is_moe(context: Context) -> bool:
    """Whether the model has experts; a model whose shape is unknown counts as one when the recipe shards experts."""
    megatron = context.recipe.policy.megatron_cfg
    if context.model is not None:
        return context.model.is_moe
    return megatron.expert_model_parallel_size > 1 or megatron.expert_tensor_parallel_size > 1


@rule("world size", "Every copy of the model takes TP x PP x CP devices; the trainer's devices must hold whole copies.")
def world_divides(context: Context) -> Iterator[Finding]:
    world, size = len(split_devices(context.recipe).policy), model_parallel_size(context.recipe)
    megatron = context.recipe.policy.megatron_cfg
    if world % size:
        shape = (
            f"TP {megatron.tensor_model_parallel_size} x PP {megatron.pipeline_model_parallel_size} "
            f"x CP {megatron.context_parallel_size} = {size}"
        )
        message = f"{world} training devices are not a multiple of {shape}"
        others = megatron.tensor_model_parallel_size * megatron.context_parallel_size
        if world % others == 0:
            near = near_divisors(world // others, megatron.pipeline_model_parallel_size)
            message += f"; PP {near} would divide"
        yield Finding((TP, PP, CP, PER_NODE, NODES), message)


@rule("expert world size", "Experts are laid out over EP x ETP x PP ranks; the trainer's devices must hold whole sets.")
def expert_world_divides(context: Context) -> Iterator[Finding]:
    megatron = context.recipe.policy.megatron_cfg
    world = len(split_devices(context.recipe).policy)
    ep, etp, pp = (
        megatron.expert_model_parallel_size,
        megatron.expert_tensor_parallel_size,
        megatron.pipeline_model_parallel_size,
    )
    if world % model_parallel_size(context.recipe):
        return
    if world % (ep * etp * pp):
        message = f"{world} training devices are not a multiple of EP {ep} x ETP {etp} x PP {pp} = {ep * etp * pp}"
        if world % (etp * pp) == 0:
            message += f"; EP {near_divisors(world // (etp * pp), ep)} would divide"
        yield Finding((EP, ETP, PP, PER_NODE, NODES), message)


@rule("experts per rank", "Each EP rank holds the same number of whole experts.")
def experts_divide(context: Context) -> Iterator[Finding]:
    ep = context.recipe.policy.megatron_cfg.expert_model_parallel_size
    if context.model is None:
        return
    if not context.model.is_moe:
        if ep > 1:
            yield Finding((EP, MODEL), f"EP {ep}, but the model is dense: expected 1")
    elif context.model.num_experts % ep:
        experts = context.model.num_experts
        message = f"EP {ep} does not divide the model's {experts} experts, expected {near_divisors(experts, ep)}"
        yield Finding((EP, MODEL), message)


@rule("expert replicas", "megatron-core reduces expert gradients over the wrong group here: replicas drift apart.")
def expert_replicas_agree(context: Context) -> Iterator[Finding]:
    megatron = context.recipe.policy.megatron_cfg
    tp = megatron.tensor_model_parallel_size
    alone = megatron.expert_tensor_parallel_size == 1 and megatron.expert_model_parallel_size == 1
    if context.model is not None and context.model.is_moe and tp > 1 and alone:
        message = f"TP {tp} with ETP 1 and EP 1 lets the experts' replicas drift apart; expected ETP {tp} or EP above 1"
        yield Finding((TP, ETP, EP), message)


@rule("sequence parallel", "megatron-core trains a mixture of experts under TP only with sequence parallelism.")
def moe_under_tp_needs_sp(context: Context) -> Iterator[Finding]:
    megatron = context.recipe.policy.megatron_cfg
    tp = megatron.tensor_model_parallel_size
    if is_moe(context) and tp > 1 and not megatron.sequence_parallel:
        yield Finding((SP, TP), f"false with TP {tp} on a mixture of experts, expected true")
    if megatron.sequence_parallel and tp == 1:
        yield Finding((SP, TP), "true with TP 1: there is nothing to shard, expected false")


@rule("heads", "Attention heads and key/value heads are split evenly over TP.")
def heads_divide(context: Context) -> Iterator[Finding]:
    tp, model = context.recipe.policy.megatron_cfg.tensor_model_parallel_size, context.model
    if model is None:
        return
    if model.num_heads % tp:
        message = f"TP {tp} does not divide the model's {model.num_heads} attention heads, "
        yield Finding((TP, MODEL), message + f"expected {near_divisors(model.num_heads, tp)}")
    elif model.num_kv_heads is not None and model.num_kv_heads % tp and tp % model.num_kv_heads:
        yield Finding((TP, MODEL), f"TP {tp} neither divides nor is a multiple of {model.num_kv_heads} key/value heads")


@rule("pipeline layers", "Every stage holds a whole number of layers, and all but the first and last the same.")
def layers_divide(context: Context) -> Iterator[Finding]:
    megatron, model = context.recipe.policy.megatron_cfg, context.model
    pp = megatron.pipeline_model_parallel_size
    first, last = megatron.num_layers_in_first_pipeline_stage, megatron.num_layers_in_last_pipeline_stage
    given = [(key, n) for key, n in ((FIRST, first), (LAST, last)) if n is not None]
    accounts = [key for key in (ACCOUNT_EMBEDDING, ACCOUNT_LOSS) if getattr(megatron, key.rpartition(".")[2])]
    if pp == 1:
        for key, layers in given:
            yield Finding((key, PP), f"{layers} with PP 1, expected null")
        return
    if given and accounts:
        yield Finding((accounts[0], given[0][0]), "cannot be combined with layer counts of the first or last stage")
    elif model is not None:
        yield from _uneven(context, given)


def _uneven(context: Context, given: list[tuple[str, int]]) -> Iterator[Finding]:
    """Layers of a known model that do not divide, given the layers of the first and last stage."""
    megatron, model = context.recipe.policy.megatron_cfg, context.model
    assert model is not None
    pp, slots = megatron.pipeline_model_parallel_size, pipeline_slots(model.num_layers, megatron)
    stages, layers = pp - len(given), slots - sum(n for _, n in given)
    keys = (PP, FIRST, LAST, ACCOUNT_EMBEDDING, ACCOUNT_LOSS, MODEL)
    if stages == 0:
        if layers:
            text = " + ".join(str(n) for _, n in given)
            yield Finding((FIRST, LAST, PP), f"first and last stage hold {text} of {model.num_layers} layers")
    elif layers < stages or layers % stages:
        more = slots - model.num_layers
        whole = f"{layers} layers" if not more else f"{layers} layers, embedding and loss counted,"
        rest = f"{layers} remaining layers over {stages} stages" if given else f"{whole} over PP {pp}"
        message = f"{rest}: expected a whole number of layers, at least one, on each"
        if not given:
            message += f", as with PP {near_divisors(layers, pp)}"
        if not given and not more and (layers + 2) % pp == 0:
            message += f"; counting embedding and loss ({ACCOUNT_EMBEDDING}, {ACCOUNT_LOSS}), {layers + 2} divide"
        yield Finding(keys, message)
