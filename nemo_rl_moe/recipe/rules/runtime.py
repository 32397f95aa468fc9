"""What the CPU cannot do. A key that would be ignored there is refused, so that a recipe never means less than it says."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_rl_moe.recipe.rules.registry import Context, Finding, rule, value_of

MEGATRON, VLLM = "policy.megatron_cfg", "policy.generation.vllm_cfg"

# Key, the values that a CPU run honours, and why the others are refused.
CPU_LIMITS: list[tuple[str, tuple, str]] = [
    (f"{MEGATRON}.context_parallel_size", (1,), "megatron-core's CPU attention has no context parallelism"),
    (
        f"{MEGATRON}.moe_token_dispatcher_type",
        ("alltoall", "allgather"),
        "the flex dispatcher's backends are CUDA kernels",
    ),
    (f"{MEGATRON}.moe_permute_fusion", (False,), "fused permutation is a Transformer Engine kernel"),
    (f"{MEGATRON}.moe_grouped_gemm", (False,), "the grouped product is a Transformer Engine kernel"),
    (f"{MEGATRON}.apply_rope_fusion", (False,), "fused rotary embedding is a Transformer Engine kernel"),
    (f"{MEGATRON}.bias_activation_fusion", (False,), "it needs torch.compile, which CPU workers turn off"),
    (f"{VLLM}.tensor_parallel_size", (1,), "a CPU engine is one process"),
    (f"{VLLM}.pipeline_parallel_size", (1,), "a CPU engine is one process"),
    (f"{VLLM}.expert_parallel_size", (1,), "a CPU engine is one process"),
]


@rule("CPU limits", "What has no CPU implementation is refused instead of ignored.")
def cpu_limits(context: Context) -> Iterator[Finding]:
    if context.recipe.cluster.device != "cpu":
        return
    for key, honoured, reason in CPU_LIMITS:
        value = value_of(context.recipe, key)
        if value not in honoured:
            wanted = " or ".join("null" if item is None else str(item).lower() for item in honoured)
            yield Finding((key,), f"{str(value).lower()} with cluster.device cpu, expected {wanted}: {reason}")
