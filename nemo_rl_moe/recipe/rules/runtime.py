"""What a run acts on. A key that would be ignored is refused, so that a recipe never means less than it says.

On a CPU the rule is part of `validate`: what is missing there is missing for good. On GPUs a recipe may ask for more
than this version trains with and still be valid, planned and compared; only `run` refuses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from nemo_rl_moe.recipe.rules.registry import Context, Finding, Rule, blame, rule, value_of
from nemo_rl_moe.recipe.source import Problem

MEGATRON, VLLM = "policy.megatron_cfg", "policy.generation.vllm_cfg"


class Limit(NamedTuple):
    """A key, the values that a run acts on, and why the others are refused."""

    key: str
    honoured: tuple[Any, ...]
    reason: str


_TE = "a Transformer Engine kernel (GPU)"
_ONE_PROCESS = "a CPU engine is one process"
_NOT_YET = "this version does not act on it yet"

# Acted on with GPUs, without a CPU implementation.
CPU_ONLY_LIMITS = [
    Limit(f"{MEGATRON}.context_parallel_size", (1,), "megatron-core's CPU attention has no context parallelism"),
    Limit(f"{MEGATRON}.moe_token_dispatcher_type", ("alltoall", "allgather"), "flex runs on CUDA kernels"),
    Limit(f"{MEGATRON}.moe_permute_fusion", (False,), _TE),
    Limit(f"{MEGATRON}.moe_grouped_gemm", (False,), _TE),
    Limit(f"{MEGATRON}.apply_rope_fusion", (False,), _TE),
    Limit(f"{MEGATRON}.bias_activation_fusion", (False,), "it needs torch.compile, which CPU workers turn off"),
    Limit(f"{VLLM}.tensor_parallel_size", (1,), _ONE_PROCESS),
    Limit(f"{VLLM}.pipeline_parallel_size", (1,), _ONE_PROCESS),
    Limit(f"{VLLM}.expert_parallel_size", (1,), _ONE_PROCESS),
]
# Ignored on GPUs only; a CPU engine is one process anyway.
GPU_ONLY_LIMITS = [
    Limit("cluster.oversubscribe_cpus", (False,), "devices are GPUs"),
    Limit("policy.sequence_packing.share_prompts", (False,), "only the local attention knows shared prompts"),
    *(
        Limit(f"{VLLM}.{kind}_parallel_size", (1,), "only an engine's first device is reserved yet")
        for kind in ("tensor", "pipeline", "expert")
    ),
]
# Not acted on by the runtime of this version, on any device.
RUN_LIMITS = [
    Limit("cluster.num_nodes", (1,), "weights reach the engines through memory of one host"),
    Limit(f"{MEGATRON}.moe_router_load_balancing_type", ("none",), "its loss would depend on the micro-batch split"),
    Limit("cluster.segment_size", (None,), _NOT_YET),
    Limit(f"{VLLM}.precision", ("auto", "float32", "bfloat16"), _NOT_YET),
    Limit(f"{VLLM}.kv_cache_dtype", ("auto",), _NOT_YET),
    Limit(f"{VLLM}.use_deep_gemm", (False,), _NOT_YET),
    Limit("policy.sequence_packing.microbatch_order", ("packer",), _NOT_YET),
    Limit("policy.sequence_packing.fuse_loss", (False,), _NOT_YET),
    Limit("policy.logprob_chunk_size", (None,), _NOT_YET),
    Limit(f"{MEGATRON}.num_layers_per_virtual_pipeline_stage", (None,), _NOT_YET),
    Limit(f"{MEGATRON}.recompute_granularity", ("full",), _NOT_YET),
    Limit(f"{MEGATRON}.moe_flex_dispatcher_backend", (None, "hybridep"), _NOT_YET),
    Limit(f"{MEGATRON}.moe_shared_expert_overlap", (False,), _NOT_YET),
    Limit(f"{MEGATRON}.overlap_moe_expert_parallel_comm", (False,), _NOT_YET),
    Limit(f"{MEGATRON}.account_for_embedding_in_pipeline_split", (False,), _NOT_YET),
    Limit(f"{MEGATRON}.account_for_loss_in_pipeline_split", (False,), _NOT_YET),
    Limit(f"{MEGATRON}.moe_router_enable_expert_bias", (False,), _NOT_YET),
    Limit(f"{MEGATRON}.mtp_num_layers", (0,), _NOT_YET),
    Limit(f"{MEGATRON}.gradient_accumulation_fusion", (False,), _NOT_YET),
    Limit(f"{MEGATRON}.defer_fp32_logits", (False,), _NOT_YET),
    Limit(f"{MEGATRON}.cuda_graph_impl", ("none",), _NOT_YET),
    Limit(f"{MEGATRON}.empty_unused_memory_level", (0,), _NOT_YET),
    Limit(f"{MEGATRON}.clear_memory_caches_before_refit", (False,), _NOT_YET),
    Limit(f"{MEGATRON}.fp8_cfg.enabled", (False,), _NOT_YET),
    Limit(f"{MEGATRON}.optimizer.use_precision_aware_optimizer", (False,), _NOT_YET),
    Limit(f"{MEGATRON}.optimizer.optimizer_cpu_offload", (False,), _NOT_YET),
]


# Left to another command.
ELSEWHERE_LIMITS = [Limit("benchmark.policy_only", (False,), "`bench train` trains it")]


@rule("CPU limits", "What a CPU run does not act on is refused instead of ignored.")
def cpu_limits(context: Context) -> Iterator[Finding]:
    if context.recipe.cluster.device == "cpu":
        yield from _beyond(context, [*CPU_ONLY_LIMITS, *RUN_LIMITS])


# What the engine is built with for correctness or from keys of its own: a second value would win without a word.
OWN_ENGINE_ARGUMENTS = frozenset(
    {
        "model",
        "tokenizer",
        "trust_remote_code",
        "hf_overrides",
        "dtype",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "seed",
        "block_size",
        "enable_expert_parallel",
        "max_model_len",
        "enforce_eager",
        "logprobs_mode",
        "weight_transfer_config",
        "worker_extension_cls",
        "kv_cache_memory_bytes",
        "enable_chunked_prefill",
        "gpu_memory_utilization",
        "enable_sleep_mode",
    }
)


@rule("vLLM arguments", "vllm_kwargs must not replace what the run itself gives the engine.")
def own_engine_arguments(context: Context) -> Iterator[Finding]:
    for name in sorted(OWN_ENGINE_ARGUMENTS & set(context.recipe.policy.generation.vllm_kwargs)):
        yield Finding(
            (f"policy.generation.vllm_kwargs.{name}",),
            f"the run sets vLLM's {name} itself, from its own keys or because its log-probabilities depend on it",
        )


def _beyond(context: Context, limits: list[Limit]) -> Iterator[Finding]:
    device = context.recipe.cluster.device
    for key, honoured, reason in limits:
        value = value_of(context.recipe, key)
        if value not in honoured:
            wanted = " or ".join(_text(item) for item in honoured)
            yield Finding((key,), f"{_text(value)} with cluster.device {device}, expected {wanted}: {reason}")


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower()


def _run_limits(context: Context) -> Iterator[Finding]:
    on_gpu = context.recipe.cluster.device == "cuda"
    yield from _beyond(context, [*RUN_LIMITS, *ELSEWHERE_LIMITS, *(GPU_ONLY_LIMITS if on_gpu else [])])


RUN_RULE = Rule("run limits", "A run refuses what it would ignore.", _run_limits)


def run_problems(context: Context) -> list[Problem]:
    """What `run` refuses of a valid recipe."""
    return [blame(RUN_RULE, finding, context) for finding in RUN_RULE.check(context)]
