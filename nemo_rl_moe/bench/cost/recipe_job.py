"""A recipe as a job of the cost model."""

from __future__ import annotations

from nemo_rl_moe.bench.choices import nearest_choice
from nemo_rl_moe.bench.cost.job import Job, ModelSizes
from nemo_rl_moe.bench.references.table import System, systems
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.memory.stages import stage_chunks
from nemo_rl_moe.recipe.placement import split_devices
from nemo_rl_moe.recipe.published_models import model_config
from nemo_rl_moe.recipe.schema import Recipe
from nemo_rl_moe.recipe.schema.policy import MegatronConfig

# The machine that a kind of GPU is in, unless benchmark.system says otherwise.
_MACHINES = {
    "h100": "dgx-h100",
    "h200": "hgx-h200",
    "b200": "hgx-b200",
    "gb200": "gb200-nvl72",
    "gb300": "gb300-nvl72",
    "gh200": "jupiter",
}


def recipe_system(recipe: Recipe) -> System | None:
    """The machine whose links and power count; None on a CPU and where the GPU is not named.

    Raises:
        UserError: benchmark.system is not in the table, or has another GPU than the recipe.
    """
    name, gpu = recipe.benchmark.system, recipe.cluster.gpu_type
    if name is not None:
        nearest_choice("benchmark.system", name, systems())
        if gpu is not None and systems()[name].gpu != gpu:
            raise UserError(f"benchmark.system: {name} has {systems()[name].gpu}, but cluster.gpu_type is {gpu}")
        return systems()[name]
    return systems()[_MACHINES[gpu]] if gpu in _MACHINES else None


def model_sizes(recipe: Recipe) -> ModelSizes | None:
    """Sizes of the recipe's model; None where its config is not known on this machine."""
    config = model_config(recipe.policy)
    return None if config is None else ModelSizes(config)


def recipe_job(recipe: Recipe, model: ModelSizes, system: System) -> Job:
    """The job of a recipe that passed the rules. Rows are full: a packed row counts as its token budget."""
    policy, megatron = recipe.policy, recipe.policy.megatron_cfg
    stages = [sum(map(len, chunks)) for chunks in stage_chunks(len(model.layers), megatron)]
    chunks = len(stage_chunks(len(model.layers), megatron)[0])
    ddp = megatron.distributed_data_parallel_config
    return Job(
        model=model,
        system=system,
        gpus=len(split_devices(recipe).policy),
        tp=megatron.tensor_model_parallel_size,
        pp=megatron.pipeline_model_parallel_size,
        vpp=chunks,
        cp=megatron.context_parallel_size,
        ep=megatron.expert_model_parallel_size,
        etp=megatron.expert_tensor_parallel_size,
        global_batch=policy.train_global_batch_size,
        micro_batch=policy.train_micro_batch_size,
        sequence=policy.max_total_sequence_length,
        precision=_precision(megatron),
        dispatcher=megatron.moe_flex_dispatcher_backend or megatron.moe_token_dispatcher_type,
        overlap=megatron.overlap_moe_expert_parallel_comm,
        recompute=recomputed(megatron),
        graphs=frozenset(megatron.cuda_graph_scope or ()) if megatron.cuda_graph_impl != "none" else frozenset(),
        sms=megatron.moe_hybridep_num_sms,
        stage_layers=(max(stages), stages[-1]),
        gradient_bytes=4 if ddp.grad_reduce_in_fp32 or policy.precision == "float32" else 2,
        gradient_overlap=ddp.overlap_grad_reduce and ddp.overlap_param_gather,
    )


def _precision(megatron: MegatronConfig) -> str:
    if not megatron.fp8_cfg.enabled:
        return "bf16"
    return "mxfp8" if megatron.fp8_cfg.fp8_recipe == "mxfp8" else "fp8"


def recomputed(megatron: MegatronConfig) -> frozenset[str]:
    """Modules that backward computes again; `full` for whole layers."""
    if not megatron.activation_checkpointing:
        return frozenset()
    if megatron.recompute_granularity == "full":
        return frozenset({"full"})
    return frozenset(megatron.recompute_modules or ("core_attn",))
