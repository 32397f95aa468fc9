"""What depends on vLLM's version or device, in one place. Imports vLLM only inside functions."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from nemo_rl_moe.errors import UserError
from nemo_rl_moe.generation.token_versions import Span
from nemo_rl_moe.recipe.schema import Recipe

# The first version that has the weight-transfer lifecycle as `refit.host_engine` implements it.
MINIMUM_VERSION = (0, 24)
# vLLM versions whose CPU backend reloads wrongly without the two functions at the end of this module: from the first to
# before the second (None: not fixed).
_CPU_RELOAD_VERSIONS: tuple[tuple[int, int], tuple[int, int] | None] = ((0, 24), None)
_DEFAULT_CPU_KV_CACHE_BYTES = 256 << 20
_CPU_BLOCK_TOKENS = 32


def vllm_version() -> tuple[int, int]:
    """Major and minor version of the installed vLLM.

    Raises:
        UserError: it is older than MINIMUM_VERSION.
    """
    import vllm

    major, minor = (int(part) for part in vllm.__version__.split(".")[:2])
    if (major, minor) < MINIMUM_VERSION:
        wanted = ".".join(map(str, MINIMUM_VERSION))
        raise UserError(f"vllm {vllm.__version__} is installed, version {wanted} or newer is needed for weight updates")
    return major, minor


def engine_arguments(recipe: Recipe, index: int) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` for the recipe's generator.

    Args:
        recipe: the whole recipe.
        index: which generation worker this is.
    """
    policy, cfg = recipe.policy, recipe.policy.generation.vllm_cfg
    on_cpu = recipe.cluster.device == "cpu"
    arguments: dict[str, Any] = {
        "model": policy.model_name,
        "tokenizer": policy.tokenizer.name or policy.model_name,
        "trust_remote_code": policy.trust_remote_code,
        "hf_overrides": policy.hf_config_overrides,
        "dtype": policy.precision if cfg.precision == "auto" else cfg.precision,
        "tensor_parallel_size": cfg.tensor_parallel_size,
        "pipeline_parallel_size": cfg.pipeline_parallel_size,
        "enable_expert_parallel": cfg.expert_parallel_size > 1,
        "max_model_len": cfg.max_model_len or policy.max_total_sequence_length,
        "enforce_eager": True if on_cpu else cfg.enforce_eager,
        "seed": recipe.grpo.seed + index,
        # Of the distribution that was sampled from: log softmax(logits / temperature). vLLM's default is at
        # temperature 1 whatever was sampled.
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": {"backend": "host"},
        "worker_extension_cls": "nemo_rl_moe.refit.host_engine.HostRefitExtension",
    }
    if on_cpu:
        arguments["kv_cache_memory_bytes"] = cfg.kv_cache_memory_bytes or _DEFAULT_CPU_KV_CACHE_BYTES
        # Smallest block of vLLM's CPU attention (its default is 128). Responses to one prompt share its whole blocks;
        # with 128 the prompts of a tiny model would share nothing and be computed once for each response.
        arguments["block_size"] = _CPU_BLOCK_TOKENS
        # After a part of a prompt vLLM winds a seeded request's generator back, which CPU generators cannot do: it
        # raises "CPU Generator does not use offset" (seen with 0.32). Whole prompts never need it.
        arguments["enable_chunked_prefill"] = False
    else:
        arguments["gpu_memory_utilization"] = cfg.gpu_memory_utilization
        arguments["enable_sleep_mode"] = gives_memory_back(recipe)
        if cfg.kv_cache_memory_bytes is not None:
            arguments["kv_cache_memory_bytes"] = cfg.kv_cache_memory_bytes
    return arguments | policy.generation.vllm_kwargs


def gives_memory_back(recipe: Recipe) -> bool:
    """Whether an engine that is put to sleep frees memory: vLLM's CPU worker has none to free, and warns when asked."""
    return recipe.cluster.device != "cpu" and recipe.policy.generation.colocated.enabled


def build_llm(recipe: Recipe, index: int) -> Any:
    """A `vllm.LLM` of the recipe, ready for weight updates through the host engine."""
    from vllm import LLM

    return LLM(**_ready_arguments(recipe, index))


def build_async_llm(recipe: Recipe, index: int) -> Any:
    """An `AsyncLLM` of the recipe, ready for weight updates through the host engine, which is a process of its own.

    To be called inside the event loop that uses it.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(**_ready_arguments(recipe, index), disable_log_stats=True)
    # The context chooses defaults such as the batch size; it must batch as `vllm.LLM` does to give the same bits.
    return AsyncLLM.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)


def _ready_arguments(recipe: Recipe, index: int) -> dict[str, Any]:
    from vllm.config import WeightTransferConfig

    vllm_version()
    arguments = engine_arguments(recipe, index)
    arguments["weight_transfer_config"] = WeightTransferConfig(**arguments["weight_transfer_config"])
    return arguments


def finish_weight_update(engine: Any, version: int) -> Any:
    """Ends a weight update of an `LLM` or `AsyncLLM`, whose answer it returns. vLLM before 0.32 keeps no version."""
    takes_version = "weight_version" in inspect.signature(engine.finish_weight_update).parameters
    return engine.finish_weight_update(**({"weight_version": str(version)} if takes_version else {}))


def weight_spans(output: Any) -> list[Span] | None:
    """What vLLM itself says of who sampled a finished output; None before 0.32, which says nothing.

    An engine that still has its checkpoint's weights says "default", our version 0.

    Args:
        output: a `CompletionOutput`.
    """
    spans = getattr(output, "weight_versions", None)
    if not spans:
        return None
    return [(0 if span.version == "default" else int(span.version), span.end - span.start) for span in spans]


def sampled_tokens(engine: Any) -> dict[int, int]:
    """Tokens of each running response of an `AsyncLLM`, by the id of the queue that its output will come from.

    Exact while the engine is paused: `pause_generation` returns after the outputs of its last step were taken in.
    """
    states = engine.output_processor.request_states.values()
    return {id(state.queue): state.detokenizer.num_output_tokens() for state in states}


def cpu_reload_needs_help(device_type: str, version: tuple[int, int]) -> bool:
    """Whether a reload on the device goes wrong without `reset_moe_kernels` before and `repack_tied_head` after it."""
    first, fixed = _CPU_RELOAD_VERSIONS
    return device_type == "cpu" and version >= first and (fixed is None or version < fixed)


def reset_moe_kernels(model: torch.nn.Module) -> None:
    """Makes the next reload of the experts take the path of the first load.

    On a CPU vLLM packs expert weights for its kernels when it builds a layer's `moe_kernel`, and only then. With a
    kernel in place, a reload copies raw weights to where packed ones belong, reports nothing, and every later
    log-probability is wrong. GPU kernels must keep theirs: CUDA graphs hold its addresses.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def repack_tied_head(model: torch.nn.Module) -> None:
    """Packs the output head anew after a reload of a model whose head is its embedding.

    No weight of the checkpoint bears the head's name, so vLLM does not touch the head in a reload; on a CPU the head
    multiplies with a packed copy, which would stay that of the old weights.
    """
    head = getattr(model, "lm_head", None)
    if head is not None:
        head.quant_method.process_weights_after_loading(head)
