"""Rules on the token dispatcher, HybridEP and the NVLink topology."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_rl_moe.recipe import hybrid_ep as hep
from nemo_rl_moe.recipe.placement import split_devices
from nemo_rl_moe.recipe.rules.layout import EP, MODEL, PP, TP
from nemo_rl_moe.recipe.rules.registry import Context, Finding, rule

MEGATRON = "policy.megatron_cfg"
DISPATCHER, BACKEND = f"{MEGATRON}.moe_token_dispatcher_type", f"{MEGATRON}.moe_flex_dispatcher_backend"
SMS, PREPAD = f"{MEGATRON}.moe_hybridep_num_sms", f"{MEGATRON}.moe_hybridep_prepad_packed_inputs"
RANKS, MNNVL = f"{MEGATRON}.hybridep_num_ranks_per_nvlink_domain", f"{MEGATRON}.hybridep_use_mnnvl"
ENV, SEGMENT, GPU = f"{MEGATRON}.env_vars", "cluster.segment_size", "cluster.gpu_type"


def _env(context: Context) -> dict[str, str]:
    return context.recipe.policy.megatron_cfg.env_vars or {}


def _env_int(context: Context, name: str) -> int | None:
    """A variable as a positive integer, None where it is absent or malformed."""
    text = _env(context).get(name, "")
    # A C library reads it: the digits of other scripts, which Python takes, are none there.
    return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else None


def _ranks(context: Context) -> int | None:
    """Ranks in a domain as the workers will see them."""
    typed = context.recipe.policy.megatron_cfg.hybridep_num_ranks_per_nvlink_domain
    return typed or _env_int(context, hep.RANKS_ENV)


@rule("dispatcher", "The flex dispatcher needs a transport and more than one rank; no other one takes a transport.")
def dispatcher_is_complete(context: Context) -> Iterator[Finding]:
    megatron = context.recipe.policy.megatron_cfg
    flex, backend = megatron.moe_token_dispatcher_type == "flex", megatron.moe_flex_dispatcher_backend
    if megatron.moe_enable_deepep:
        yield Finding((f"{MEGATRON}.moe_enable_deepep",), f"expected false; {BACKEND}=deepep selects it")
    if flex and backend is None:
        yield Finding((BACKEND, DISPATCHER), "the flex dispatcher needs a backend, expected hybridep or deepep")
    if backend is not None and not flex:
        message = f"{backend} has no effect with dispatcher {megatron.moe_token_dispatcher_type}, expected flex"
        yield Finding((BACKEND, DISPATCHER), message)
    if flex and context.model is not None and not context.model.is_moe:
        yield Finding((DISPATCHER, MODEL), "flex on a dense model, which has no experts to reach: expected alltoall")
    elif flex and megatron.tensor_model_parallel_size * megatron.expert_model_parallel_size == 1:
        yield Finding((DISPATCHER, EP, TP), "flex needs TP x EP above 1")
    if megatron.moe_shared_expert_overlap and megatron.moe_token_dispatcher_type != "alltoall":
        yield Finding((f"{MEGATRON}.moe_shared_expert_overlap", DISPATCHER), "only the alltoall dispatcher overlaps")


@rule("HybridEP keys", "A HybridEP key or variable without HybridEP would be ignored.")
def hybrid_ep_keys_need_it(context: Context) -> Iterator[Finding]:
    megatron = context.recipe.policy.megatron_cfg
    if hep.uses_hybrid_ep(context.recipe):
        if megatron.moe_hybridep_num_sms is None:
            message = "expected a number, such as 32: the default differs between megatron-core and DeepEP versions"
            yield Finding((SMS, BACKEND), message)
        return
    typed = {
        SMS: megatron.moe_hybridep_num_sms,
        RANKS: megatron.hybridep_num_ranks_per_nvlink_domain,
        MNNVL: megatron.hybridep_use_mnnvl,
        PREPAD: megatron.moe_hybridep_prepad_packed_inputs or None,
    }
    set_keys = [key for key, value in typed.items() if value is not None]
    set_keys += [f"{ENV}.{name}" for name in hep.TOPOLOGY_ENV if name in _env(context)]
    # A flex dispatcher that lost its backend has its own finding.
    if megatron.moe_token_dispatcher_type != "flex" or megatron.moe_flex_dispatcher_backend == "deepep":
        for key in set_keys:
            yield Finding((key,), f"has no effect without {BACKEND} hybridep under the flex dispatcher")


@rule(
    "HybridEP environment", "The workers learn the topology from variables: all four are written out and well formed."
)
def environment_is_explicit(context: Context) -> Iterator[Finding]:
    if not hep.uses_hybrid_ep(context.recipe):
        return
    env, expected = _env(context), hep.expected_environment(context.recipe)
    for name in hep.TOPOLOGY_ENV:
        hint = f', expected "{expected[name]}"' if name in expected else ""
        if name not in env:
            yield Finding((f"{ENV}.{name}", ENV), f"HybridEP needs {name} in env_vars{hint}")
        elif name == hep.MNNVL_ENV:
            if env[name] not in ("0", "1"):
                yield Finding((f"{ENV}.{name}",), f'{env[name]!r}, expected "0" or "1"')
        elif _env_int(context, name) is None:
            yield Finding((f"{ENV}.{name}",), f"{env[name]!r}, expected a positive integer as text{hint}")


@rule("HybridEP typed keys", "A typed key and its variable say the same thing.")
def typed_keys_agree(context: Context) -> Iterator[Finding]:
    megatron = context.recipe.policy.megatron_cfg
    if not hep.uses_hybrid_ep(context.recipe):
        return
    ranks, typed = _env_int(context, hep.RANKS_ENV), megatron.hybridep_num_ranks_per_nvlink_domain
    if typed is not None and ranks is not None and typed != ranks:
        yield Finding((RANKS, f"{ENV}.{hep.RANKS_ENV}"), f"{typed}, but {hep.RANKS_ENV} is {ranks}")
    flag, mnnvl = _env(context).get(hep.MNNVL_ENV), megatron.hybridep_use_mnnvl
    if mnnvl is not None and flag in ("0", "1") and mnnvl != (flag == "1"):
        yield Finding((MNNVL, f"{ENV}.{hep.MNNVL_ENV}"), f"{str(mnnvl).lower()}, but {hep.MNNVL_ENV} is {flag}")


@rule(
    "HybridEP topology", "Ranks in a domain are all of EP in an NVL72 rack; elsewhere they divide EP and fit the node."
)
def topology_fits_gpu(context: Context) -> Iterator[Finding]:
    recipe, ranks, ep = context.recipe, _ranks(context), context.recipe.policy.megatron_cfg.expert_model_parallel_size
    if not hep.uses_hybrid_ep(recipe) or ranks is None:
        return
    domain = hep.domain_of(recipe)
    keys = (f"{ENV}.{hep.RANKS_ENV}", RANKS, EP)
    if ep % ranks:
        yield Finding(keys, f"{ranks} ranks in an NVLink domain do not divide EP {ep}")
    elif domain is not None and ranks > domain.gpus:
        yield Finding(keys, f"{ranks} ranks in an NVLink domain of {domain.gpus} GPUs ({recipe.cluster.gpu_type})")
    elif domain is not None and not domain.spans_nodes and ranks > recipe.cluster.gpus_per_node:
        message = f"{ranks} ranks in an NVLink domain, but the domain is the node and a node has "
        yield Finding((*keys, "cluster.gpus_per_node"), message + f"{recipe.cluster.gpus_per_node} GPUs")
    elif domain is not None and domain.spans_nodes and ranks != ep:
        yield Finding(keys, f"{ranks} ranks in an NVLink domain, expected EP {ep}: the rack's NVLink reaches all of it")
    elif ep // ranks > hep.MAX_DOMAINS:
        yield Finding(keys, f"EP {ep} over {ep // ranks} domains, expected {hep.MAX_DOMAINS} at most")
    elif ep // ranks > 1 and hep.tokens_per_rank(recipe) > hep.MAX_TOKENS_BETWEEN_DOMAINS:
        message = f"{hep.tokens_per_rank(recipe)} tokens on a rank in one micro-batch; HybridEP takes "
        message += f"{hep.MAX_TOKENS_BETWEEN_DOMAINS} at most between domains"
        yield Finding(
            ("policy.sequence_packing", "policy.train_micro_batch_size", "policy.max_total_sequence_length"), message
        )
    if domain is None:
        return
    size, flag = _env_int(context, hep.DOMAIN_ENV), _env(context).get(hep.MNNVL_ENV)
    if size is not None and size != domain.gpus:
        message = f"{size}, expected {domain.gpus} on {recipe.cluster.gpu_type}"
        yield Finding((f"{ENV}.{hep.DOMAIN_ENV}", GPU), message)
    if flag in ("0", "1") and (flag == "1") != domain.spans_nodes:
        reach = "spans nodes" if domain.spans_nodes else "ends at the node"
        message = (
            f'"{flag}", expected "{int(domain.spans_nodes)}": the NVLink domain of {recipe.cluster.gpu_type} {reach}'
        )
        yield Finding((f"{ENV}.{hep.MNNVL_ENV}", MNNVL, GPU), message)


@rule("HybridEP prepadding", "EP ranks need one length: on exactly for packed inputs with PP 1 and no MTP layers.")
def prepadding_iff_eligible(context: Context) -> Iterator[Finding]:
    megatron, needed = context.recipe.policy.megatron_cfg, hep.needs_prepadding(context.recipe)
    if hep.uses_hybrid_ep(context.recipe) and megatron.moe_hybridep_prepad_packed_inputs != needed:
        keys = (PREPAD, PP, "policy.sequence_packing.enabled", f"{MEGATRON}.mtp_num_layers")
        packing = "packed" if context.recipe.policy.sequence_packing.enabled else "unpacked"
        shape = f"{packing} inputs, PP {megatron.pipeline_model_parallel_size}, {megatron.mtp_num_layers} MTP layers"
        yield Finding(keys, f"{str(not needed).lower()}, expected {str(needed).lower()} with {shape}")


@rule("HybridEP shape", "Limits of the kernels: hidden size, experts in a domain, combine chunk.")
def shape_fits_kernels(context: Context) -> Iterator[Finding]:
    recipe, model, ranks = context.recipe, context.model, _ranks(context)
    if not hep.uses_hybrid_ep(recipe):
        return
    ep, chunk = recipe.policy.megatron_cfg.expert_model_parallel_size, _env_int(context, hep.CHUNK_ENV)
    if chunk is not None and chunk % 32:
        yield Finding((f"{ENV}.{hep.CHUNK_ENV}",), f"{chunk} tokens, expected a multiple of 32")
    if model is None:
        return
    if model.hidden_size % 16:
        yield Finding((BACKEND, MODEL), f"hidden size {model.hidden_size}, but HybridEP moves multiples of 16")
    if ranks and model.num_experts % ep == 0 and ep % ranks == 0 and model.num_experts // ep * ranks % 4:
        message = f"{model.num_experts // ep} experts on each of {ranks} ranks: expected a multiple of 4 in a domain"
        yield Finding((EP, f"{ENV}.{hep.RANKS_ENV}"), message)


@rule("GPU type", "A node holds as many GPUs as its type has, and an NVLink rack holds 72.")
def gpu_type_fits_nodes(context: Context) -> Iterator[Finding]:
    cluster, domain = context.recipe.cluster, hep.domain_of(context.recipe)
    if cluster.device == "cpu" and cluster.gpu_type is not None:
        yield Finding((GPU, "cluster.device"), f"{cluster.gpu_type} with device cpu, expected null")
    elif cluster.device == "cpu" and cluster.gpu_memory_gib is not None:
        yield Finding(("cluster.gpu_memory_gib", "cluster.device"), "has no effect with device cpu, expected null")
    elif domain is not None and cluster.gpus_per_node > domain.gpus_per_node:
        message = f"{cluster.gpus_per_node} GPUs on a node; {cluster.gpu_type} has {domain.gpus_per_node}"
        yield Finding(("cluster.gpus_per_node", GPU), message)


@rule(
    "segments", "An EP group that leaves its NVLink rack stalls: segments hold whole groups, and nodes whole segments."
)
def segments_hold_expert_groups(context: Context) -> Iterator[Finding]:
    recipe, cluster, domain = context.recipe, context.recipe.cluster, hep.domain_of(context.recipe)
    ep, size = recipe.policy.megatron_cfg.expert_model_parallel_size, cluster.segment_size
    if size is None:
        if hep.uses_hybrid_ep(recipe) and domain is not None and domain.spans_nodes and ep > cluster.gpus_per_node:
            nodes = -(-ep // cluster.gpus_per_node)
            message = f"expected {nodes} nodes (EP {ep} / {cluster.gpus_per_node} GPUs), or a multiple"
            yield Finding((SEGMENT, EP), message)
        return
    if domain is not None and size * cluster.gpus_per_node > domain.gpus:
        message = f"{size} nodes x {cluster.gpus_per_node} GPUs are more than the {domain.gpus} of an NVLink domain"
        yield Finding((SEGMENT, "cluster.gpus_per_node"), message)
        return
    if size * cluster.gpus_per_node % ep:
        message = f"{size} nodes x {cluster.gpus_per_node} GPUs are not a multiple of EP {ep}"
        yield Finding((SEGMENT, EP, "cluster.gpus_per_node"), message)
        return
    split = split_devices(recipe)
    for nodes, side in ((split.policy_nodes, "training"), (split.generation_nodes, "generation")):
        if nodes % size:
            keys = (SEGMENT, "cluster.num_nodes", "policy.generation.colocated.resources.num_nodes")
            yield Finding(keys, f"{nodes} {side} nodes are not a multiple of segments of {size}")
            return


@rule("router format", "HybridEP carries routing probabilities in float32.")
def router_format(context: Context) -> Iterator[Finding]:
    megatron = context.recipe.policy.megatron_cfg
    if hep.uses_hybrid_ep(context.recipe) and megatron.moe_router_dtype != "fp32":
        message = f"{megatron.moe_router_dtype}: HybridEP casts the router's probabilities to fp32"
        yield Finding((f"{MEGATRON}.moe_router_dtype",), message, "note")


UNREAD = {
    hep.DOMAIN_ENV: "read by neither megatron-core nor DeepEP; it only states the domain that the rules check",
    "NRL_REFIT_BUFFER_MEMORY_RATIO": "NeMo-RL's refit buffer; nothing reads it here",
    "NRL_REFIT_NUM_BUFFERS": "NeMo-RL's refit buffers; nothing reads it here",
}


@rule("unread variables", "A variable that nothing reads looks like a setting and is none.")
def unread_variables(context: Context) -> Iterator[Finding]:
    for block, env in (
        (ENV, _env(context)),
        ("policy.generation.vllm_cfg.env_vars", context.recipe.policy.generation.vllm_cfg.env_vars or {}),
    ):
        for name, reason in UNREAD.items():
            if name in env:
                yield Finding((f"{block}.{name}",), f"{name} is {reason}", "note")
