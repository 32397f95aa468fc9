"""Rules on the trainer's optimizer, schedule, recomputation and memory keys."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_rl_moe.recipe.memory.stages import pipeline_slots
from nemo_rl_moe.recipe.rules.batches import GLOBAL, MICRO, dp_size
from nemo_rl_moe.recipe.rules.divisors import near_divisors
from nemo_rl_moe.recipe.rules.layout import FIRST, LAST, PP
from nemo_rl_moe.recipe.rules.registry import Context, Finding, rule

MEGATRON = "policy.megatron_cfg"
OPTIMIZER, SCHEDULER, DDP = (
    f"{MEGATRON}.{name}" for name in ("optimizer", "scheduler", "distributed_data_parallel_config")
)


@rule("optimizer", "Megatron shards the state of adam only, and offloads only what it shards.")
def optimizer_is_possible(context: Context) -> Iterator[Finding]:
    optimizer = context.recipe.policy.megatron_cfg.optimizer
    if optimizer.use_distributed_optimizer and optimizer.optimizer != "adam":
        message = f"use_distributed_optimizer true with optimizer {optimizer.optimizer}, expected false: "
        message += "Megatron shards the state of adam only"
        yield Finding((f"{OPTIMIZER}.use_distributed_optimizer", f"{OPTIMIZER}.optimizer"), message)
    fraction, offload = optimizer.optimizer_offload_fraction, optimizer.optimizer_cpu_offload
    keys = (f"{OPTIMIZER}.optimizer_offload_fraction", f"{OPTIMIZER}.optimizer_cpu_offload")
    if offload and fraction == 0:
        yield Finding(keys, "0 offloads nothing, expected more than 0 with optimizer_cpu_offload")
    formats = [key for key in ("exp_avg_dtype", "exp_avg_sq_dtype") if getattr(optimizer, key) != "fp32"]
    if formats and not optimizer.use_precision_aware_optimizer:
        state = (f"{OPTIMIZER}.{formats[0]}", f"{OPTIMIZER}.use_precision_aware_optimizer")
        yield Finding(state, f"{getattr(optimizer, formats[0])} needs use_precision_aware_optimizer true")
    if optimizer.use_precision_aware_optimizer and not optimizer.use_distributed_optimizer:
        keys_of_both = (f"{OPTIMIZER}.use_precision_aware_optimizer", f"{OPTIMIZER}.use_distributed_optimizer")
        yield Finding(keys_of_both, "needs the distributed optimizer")
    if not offload and fraction > 0:
        yield Finding(keys, "has no effect while optimizer_cpu_offload is false")
    if offload and not optimizer.use_distributed_optimizer and optimizer.optimizer == "adam":
        message = "offloading needs the distributed optimizer"
        yield Finding((f"{OPTIMIZER}.optimizer_cpu_offload", f"{OPTIMIZER}.use_distributed_optimizer"), message)


@rule("learning rate", "A decay that ends above its start, or before its warm-up does, is a mistake.")
def schedule_is_ordered(context: Context) -> Iterator[Finding]:
    megatron = context.recipe.policy.megatron_cfg
    lr, least, schedule = megatron.optimizer.lr, megatron.optimizer.min_lr, megatron.scheduler
    if least > lr:
        yield Finding((f"{OPTIMIZER}.min_lr", f"{OPTIMIZER}.lr"), f"{least:g} is above lr {lr:g}")
    if schedule.lr_warmup_init > lr:
        message = f"{schedule.lr_warmup_init:g} is above lr {lr:g}"
        yield Finding((f"{SCHEDULER}.lr_warmup_init", f"{OPTIMIZER}.lr"), message)
    if schedule.lr_warmup_iters >= schedule.lr_decay_iters:
        message = (
            f"{schedule.lr_warmup_iters} warm-up steps are not fewer than lr_decay_iters {schedule.lr_decay_iters}"
        )
        yield Finding((f"{SCHEDULER}.lr_warmup_iters", f"{SCHEDULER}.lr_decay_iters"), message)


@rule("gradient overlap", "Parameters are gathered in buckets that only the sharded, overlapped reduction makes.")
def overlap_is_possible(context: Context) -> Iterator[Finding]:
    megatron = context.recipe.policy.megatron_cfg
    ddp = megatron.distributed_data_parallel_config
    if not ddp.overlap_param_gather:
        return
    if not megatron.optimizer.use_distributed_optimizer:
        keys = (f"{DDP}.overlap_param_gather", f"{OPTIMIZER}.use_distributed_optimizer")
        yield Finding(keys, "overlap_param_gather needs the distributed optimizer")
    elif not ddp.overlap_grad_reduce:
        yield Finding((f"{DDP}.overlap_param_gather", f"{DDP}.overlap_grad_reduce"), "needs overlap_grad_reduce true")


@rule("recomputation", "Keys of recomputation that do not act together.")
def recomputation_is_possible(context: Context) -> Iterator[Finding]:
    megatron = context.recipe.policy.megatron_cfg
    modules, granularity = f"{MEGATRON}.recompute_modules", f"{MEGATRON}.recompute_granularity"
    if not megatron.activation_checkpointing and megatron.recompute_granularity != "full":
        message = "has no effect while activation_checkpointing is false"
        yield Finding((granularity, f"{MEGATRON}.activation_checkpointing"), message)
    elif megatron.recompute_modules is not None and megatron.recompute_granularity == "full":
        yield Finding((modules, granularity), "has no effect with recompute_granularity full, expected selective")
    elif "moe_act" in (megatron.recompute_modules or ()) and not megatron.moe_grouped_gemm:
        yield Finding((modules, f"{MEGATRON}.moe_grouped_gemm"), "moe_act is recomputed in the grouped product only")


@rule("virtual pipeline", "The interleaved schedule cuts each stage into equal chunks.")
def virtual_stages_divide(context: Context) -> Iterator[Finding]:
    megatron, model = context.recipe.policy.megatron_cfg, context.model
    chunk, pp = megatron.num_layers_per_virtual_pipeline_stage, megatron.pipeline_model_parallel_size
    key = f"{MEGATRON}.num_layers_per_virtual_pipeline_stage"
    if chunk is None:
        return
    if pp == 1:
        yield Finding((key, PP), f"{chunk} with PP 1, expected null")
    elif megatron.num_layers_in_first_pipeline_stage or megatron.num_layers_in_last_pipeline_stage:
        yield Finding((key, FIRST, LAST), "cannot be combined with layer counts of the first or last stage")
    elif model is not None and (slots := pipeline_slots(model.num_layers, megatron)) % pp == 0 and slots // pp % chunk:
        message = f"{slots // pp} layers on a stage are not a multiple of {chunk}, "
        yield Finding((key, PP), message + f"expected {near_divisors(slots // pp, chunk)}")
    elif (micro := _micro_batches(context)) is not None and micro % pp:
        message = f"{micro} micro-batches on each rank are not a multiple of PP {pp}, as interleaving needs"
        yield Finding((key, PP, GLOBAL, MICRO), message)


def _micro_batches(context: Context) -> int | None:
    """Training micro-batches of a rank in one optimizer step; None where packing decides or a batch does not divide."""
    policy, dp = context.recipe.policy, dp_size(context)
    if (
        policy.sequence_packing.enabled
        or not dp
        or policy.train_global_batch_size % (dp * policy.train_micro_batch_size)
    ):
        return None
    return policy.train_global_batch_size // dp // policy.train_micro_batch_size


@rule("router balance", "A coefficient, rate or loss of the router whose partner is off does nothing.")
def router_keys_agree(context: Context) -> Iterator[Finding]:
    megatron = context.recipe.policy.megatron_cfg
    kind, coeff = f"{MEGATRON}.moe_router_load_balancing_type", f"{MEGATRON}.moe_aux_loss_coeff"
    if megatron.moe_router_load_balancing_type == "none" and megatron.moe_aux_loss_coeff:
        yield Finding((coeff, kind), "has no effect with moe_router_load_balancing_type none")
    if megatron.moe_router_load_balancing_type != "none" and not megatron.moe_aux_loss_coeff:
        yield Finding((kind, coeff), "has no effect with moe_aux_loss_coeff 0")
    if megatron.moe_router_bias_update_rate and not megatron.moe_router_enable_expert_bias:
        keys = (f"{MEGATRON}.moe_router_bias_update_rate", f"{MEGATRON}.moe_router_enable_expert_bias")
        yield Finding(keys, "has no effect while moe_router_enable_expert_bias is false")


@rule("logprob chunks", "Logits can be made chunk by chunk only when none of them is turned to float32 before.")
def chunks_need_deferred_logits(context: Context) -> Iterator[Finding]:
    policy = context.recipe.policy
    if policy.logprob_chunk_size is not None and not policy.megatron_cfg.defer_fp32_logits:
        keys = ("policy.logprob_chunk_size", f"{MEGATRON}.defer_fp32_logits")
        yield Finding(keys, f"{policy.logprob_chunk_size} needs defer_fp32_logits true")


@rule("batch invariance", "Under a large TP, log-probabilities depend a little on the shape of the micro-batch.")
def passes_have_one_shape(context: Context) -> Iterator[Finding]:
    policy = context.recipe.policy
    tp, micro, logprob = (
        policy.megatron_cfg.tensor_model_parallel_size,
        policy.train_micro_batch_size,
        policy.logprob_batch_size,
    )
    if tp >= 4 and micro != logprob and not context.recipe.loss_fn.force_on_policy_ratio:
        message = (
            f"{logprob}, but the training micro-batch is {micro}: with TP {tp} the two passes differ by rounding; "
        )
        message += "equal sizes or force_on_policy_ratio avoid it"
        yield Finding(("policy.logprob_batch_size", "policy.train_micro_batch_size"), message, "warning")
