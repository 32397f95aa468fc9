"""Rules on what runs beside what, on CUDA graphs, and on benchmarks."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_rl_moe.recipe.rules.layout import CP, EP, PP, TP
from nemo_rl_moe.recipe.rules.precision import HOPPER
from nemo_rl_moe.recipe.rules.registry import Context, Finding, rule

MEGATRON = "policy.megatron_cfg"
OVERLAP, DELAY = f"{MEGATRON}.overlap_moe_expert_parallel_comm", f"{MEGATRON}.delay_wgrad_compute"
GRAPHS, SCOPE = f"{MEGATRON}.cuda_graph_impl", f"{MEGATRON}.cuda_graph_scope"
ENV, CONNECTIONS = f"{MEGATRON}.env_vars", "CUDA_DEVICE_MAX_CONNECTIONS"
FORCED = f"{MEGATRON}.moe_router_force_load_balancing"


@rule("all-to-all overlap", "megatron-core overlaps the experts' all-to-all of two micro-batches, and not with these.")
def overlap_is_possible(context: Context) -> Iterator[Finding]:
    policy, megatron = context.recipe.policy, context.recipe.policy.megatron_cfg
    if not megatron.overlap_moe_expert_parallel_comm:
        if megatron.delay_wgrad_compute:
            yield Finding((DELAY, OVERLAP), "has no effect without overlap_moe_expert_parallel_comm")
        return
    if megatron.expert_model_parallel_size == 1:
        yield Finding((OVERLAP, EP), "true with EP 1: there is nothing to overlap, expected false")
    if megatron.moe_token_dispatcher_type == "allgather":
        yield Finding((OVERLAP, f"{MEGATRON}.moe_token_dispatcher_type"), "needs dispatcher alltoall or flex")
    if megatron.pipeline_model_parallel_size > 1 and megatron.num_layers_per_virtual_pipeline_stage is None:
        keys = (OVERLAP, f"{MEGATRON}.num_layers_per_virtual_pipeline_stage", PP)
        yield Finding(keys, "with PP above 1 it needs num_layers_per_virtual_pipeline_stage")
    if policy.precision != "bfloat16":
        yield Finding((OVERLAP, "policy.precision"), f"needs precision bfloat16, found {policy.precision}")
    if megatron.moe_shared_expert_overlap:
        yield Finding((OVERLAP, f"{MEGATRON}.moe_shared_expert_overlap"), "excludes moe_shared_expert_overlap")
    if megatron.mtp_num_layers > 1:
        yield Finding((OVERLAP, f"{MEGATRON}.mtp_num_layers"), "allows one multi-token-prediction layer at most")
    if megatron.activation_checkpointing:
        if megatron.recompute_granularity == "full":
            keys = (OVERLAP, f"{MEGATRON}.recompute_granularity", f"{MEGATRON}.activation_checkpointing")
            yield Finding(keys, "excludes full recomputation, expected selective or none")
        elif "moe" in (megatron.recompute_modules or ()):
            yield Finding((OVERLAP, f"{MEGATRON}.recompute_modules"), "excludes recomputing moe; moe_act can be")


@rule("CUDA graphs", "A scope needs graphs, and parts of the expert layer are captured in an order.")
def graphs_are_possible(context: Context) -> Iterator[Finding]:
    megatron = context.recipe.policy.megatron_cfg
    scope, impl = set(megatron.cuda_graph_scope or ()), megatron.cuda_graph_impl
    recomputed = set(megatron.recompute_modules or ()) if megatron.activation_checkpointing else set()
    if megatron.cuda_graph_scope is not None and impl == "none":
        yield Finding((SCOPE, GRAPHS), "has no effect with cuda_graph_impl none")
        return
    env = megatron.env_vars or {}
    segments = "expandable_segments:True" in env.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if impl == "transformer_engine" and segments and env.get("NCCL_GRAPH_REGISTER") != "0":
        keys = (f"{ENV}.NCCL_GRAPH_REGISTER", GRAPHS, f"{ENV}.PYTORCH_CUDA_ALLOC_CONF")
        yield Finding(keys, 'transformer_engine graphs with expandable_segments:True need NCCL_GRAPH_REGISTER "0"')
    if "moe_preprocess" in scope and "moe_router" not in scope:
        yield Finding((SCOPE,), "moe_preprocess needs moe_router in the scope")
    if "moe" in scope:
        yield Finding((SCOPE,), "moe needs tokens dropped and padded to a fixed number, which is not supported here")
    if "moe" in recomputed and "moe_router" in scope:
        yield Finding((SCOPE, f"{MEGATRON}.recompute_modules"), "moe_router cannot be captured where moe is recomputed")
    if megatron.overlap_moe_expert_parallel_comm and scope & {"moe", "mlp"}:
        yield Finding((SCOPE, OVERLAP), "moe and mlp cannot be captured with overlap_moe_expert_parallel_comm")


@rule("device connections", "On Hopper, TP and CP overlap their communication in the order of one hardware queue.")
def connections_keep_order(context: Context) -> Iterator[Finding]:
    megatron, gpu = context.recipe.policy.megatron_cfg, context.recipe.cluster.gpu_type
    sharded = megatron.tensor_model_parallel_size > 1 or megatron.context_parallel_size > 1
    found = (megatron.env_vars or {}).get(CONNECTIONS, "1")
    if gpu in HOPPER and sharded and found != "1" and not megatron.overlap_moe_expert_parallel_comm:
        message = f'"{found}" on {gpu} with TP or CP above 1, expected "1" unless overlap_moe_expert_parallel_comm'
        yield Finding((f"{ENV}.{CONNECTIONS}", TP, CP), message, "warning")


@rule("forced routing", "Tokens that go anywhere teach nothing: only a benchmark may force the balance.")
def forced_routing_is_for_benchmarks(context: Context) -> Iterator[Finding]:
    recipe = context.recipe
    if recipe.policy.megatron_cfg.moe_router_force_load_balancing and not recipe.benchmark.policy_only:
        yield Finding((FORCED, "benchmark.policy_only"), "true in a recipe that trains, expected false")


@rule("benchmark steps", "What is left after the warm-up is measured.")
def benchmark_measures(context: Context) -> Iterator[Finding]:
    benchmark = context.recipe.benchmark
    if benchmark.warmup_steps >= benchmark.steps:
        message = f"{benchmark.warmup_steps} warm-up steps leave none of {benchmark.steps} to measure"
        yield Finding(("benchmark.warmup_steps", "benchmark.steps"), message)
