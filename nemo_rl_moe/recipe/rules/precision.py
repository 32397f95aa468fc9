"""Rules on number formats: fp8 rollouts, fp8 training, and what depends on them."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_rl_moe.recipe.rules.layout import is_moe
from nemo_rl_moe.recipe.rules.registry import Context, Finding, rule

VLLM, FP8 = "policy.generation.vllm_cfg", "policy.megatron_cfg.fp8_cfg"
BACKEND = "policy.generation.vllm_kwargs.moe_backend"
BLACKWELL, HOPPER = ("b200", "gb200", "gb300"), ("h100", "h200", "gh200")
MX_MOE_BACKEND = "flashinfer_trtllm"


@rule("fp8 rollout keys", "Without precision fp8 the engine's fp8 keys do nothing.")
def rollout_keys_need_fp8(context: Context) -> Iterator[Finding]:
    vllm = context.recipe.policy.generation.vllm_cfg
    if vllm.precision == "fp8":
        return
    typed = {
        "is_mx": vllm.is_mx,
        "quantization_ignore_patterns": vllm.quantization_ignore_patterns,
        "num_first_layers_in_bf16": vllm.num_first_layers_in_bf16,
        "num_last_layers_in_bf16": vllm.num_last_layers_in_bf16,
        "use_deep_gemm": vllm.use_deep_gemm,
    }
    for key, value in typed.items():
        if value:
            yield Finding(
                (f"{VLLM}.{key}", f"{VLLM}.precision"), f"has no effect with precision {vllm.precision}, expected fp8"
            )


@rule("MXFP8 rollout", "MXFP8 is Blackwell's format; its ignore patterns and expert kernels are stated, not guessed.")
def mxfp8_is_complete(context: Context) -> Iterator[Finding]:
    generation, gpu = context.recipe.policy.generation, context.recipe.cluster.gpu_type
    vllm, backend = generation.vllm_cfg, generation.vllm_kwargs.get("moe_backend")
    mx = vllm.precision == "fp8" and vllm.is_mx
    if mx:
        if gpu in HOPPER:
            yield Finding(
                (f"{VLLM}.is_mx", "cluster.gpu_type"), f"MXFP8 on {gpu}, expected one of {', '.join(BLACKWELL)}"
            )
        if vllm.use_deep_gemm:
            yield Finding(
                (f"{VLLM}.use_deep_gemm", f"{VLLM}.is_mx"), "DeepGEMM is for blockwise fp8, expected false with is_mx"
            )
        if not vllm.quantization_ignore_patterns:
            message = "expected the modules that stay in bfloat16, such as [q_proj, k_proj, v_proj, o_proj]"
            yield Finding((f"{VLLM}.quantization_ignore_patterns", f"{VLLM}.is_mx"), message)
        if is_moe(context) and backend != MX_MOE_BACKEND:
            yield Finding((BACKEND, f"{VLLM}.is_mx"), f"{backend} with MXFP8 experts, expected {MX_MOE_BACKEND}")
    elif backend == MX_MOE_BACKEND and vllm.precision != "fp8":
        message = f"{backend} rearranges bfloat16 expert weights so that a refit cannot write them, expected triton"
        yield Finding((BACKEND, f"{VLLM}.precision"), message)


@rule("fp8 training", "What Transformer Engine and megatron-core accept for fp8 training.")
def fp8_training_is_possible(context: Context) -> Iterator[Finding]:
    policy, gpu = context.recipe.policy, context.recipe.cluster.gpu_type
    megatron, fp8 = policy.megatron_cfg, policy.megatron_cfg.fp8_cfg
    if not fp8.enabled:
        if fp8.fp8_param:
            yield Finding((f"{FP8}.fp8_param", f"{FP8}.enabled"), "has no effect while fp8_cfg.enabled is false")
        return
    if policy.precision != "bfloat16":
        message = f"fp8 training with policy.precision {policy.precision}, expected bfloat16"
        yield Finding((f"{FP8}.enabled", "policy.precision"), message)
    if fp8.fp8_recipe == "mxfp8" and gpu in HOPPER:
        yield Finding(
            (f"{FP8}.fp8_recipe", "cluster.gpu_type"), f"mxfp8 on {gpu}, expected one of {', '.join(BLACKWELL)}"
        )
    if fp8.fp8_recipe == "blockwise" and gpu in BLACKWELL:
        message = f"blockwise on {gpu}: Hopper's recipe, expected mxfp8"
        yield Finding((f"{FP8}.fp8_recipe", f"{FP8}.enabled", "cluster.gpu_type"), message)
    if fp8.fp8_param and not megatron.optimizer.use_distributed_optimizer:
        message = "fp8 parameters need the distributed optimizer"
        yield Finding((f"{FP8}.fp8_param", "policy.megatron_cfg.optimizer.use_distributed_optimizer"), message)
    if fp8.fp8_param and megatron.optimizer.optimizer_cpu_offload and fp8.fp8_recipe != "delayed":
        message = f"fp8 parameters with an offloaded optimizer need the delayed recipe, found {fp8.fp8_recipe}"
        yield Finding((f"{FP8}.fp8_param", "policy.megatron_cfg.optimizer.optimizer_cpu_offload"), message)
    elif fp8.fp8_param and megatron.optimizer.optimizer_cpu_offload:
        precise = "policy.megatron_cfg.optimizer.use_precision_aware_optimizer"
        if not megatron.optimizer.use_precision_aware_optimizer:
            yield Finding(
                (f"{FP8}.fp8_param", precise), f"fp8 parameters with an offloaded optimizer need {precise} true"
            )
    recomputed = set(megatron.recompute_modules or ()) & {"moe_act", "layernorm"}
    if recomputed and fp8.fp8_recipe == "delayed":
        names = " and ".join(sorted(recomputed))
        message = f"{names} cannot be recomputed under the delayed recipe, whose scales would change in between"
        yield Finding(("policy.megatron_cfg.recompute_modules", f"{FP8}.fp8_recipe"), message)
