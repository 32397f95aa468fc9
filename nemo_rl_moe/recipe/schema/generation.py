"""`policy.generation`: the vLLM generator, its sampling and its placement."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from nemo_rl_moe.recipe.schema.base import Section


class VllmConfig(Section):
    """`policy.generation.vllm_cfg`: the vLLM engine."""

    async_engine: bool = False
    """Use vLLM's AsyncLLM; async placement needs it."""
    precision: Literal["auto", "float32", "bfloat16", "fp8"] = "auto"
    """Number format of the engine's weights; auto takes `policy.precision`; fp8 quantises them at each refit."""
    is_mx: bool = False
    """With precision fp8: MXFP8, one scale for each 32 values (Blackwell); off is blockwise fp8."""
    quantization_ignore_patterns: list[str] | None = None
    """With precision fp8: modules whose name contains one of these stay in bfloat16; null quantises all that can be."""
    num_first_layers_in_bf16: NonNegativeInt = 0
    """With precision fp8: layers at the start that stay in bfloat16."""
    num_last_layers_in_bf16: NonNegativeInt = 0
    """With precision fp8: layers at the end that stay in bfloat16."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Number format of the key/value cache; auto is the engine's."""
    use_deep_gemm: bool = False
    """DeepGEMM kernels for blockwise fp8 (Hopper)."""
    tensor_parallel_size: PositiveInt = 1
    """TP of one engine, in devices."""
    pipeline_parallel_size: PositiveInt = 1
    """PP of one engine, in devices."""
    expert_parallel_size: PositiveInt = 1
    """EP of one engine; 1 shards the experts as TP does."""
    gpu_memory_utilization: float = Field(0.6, gt=0, le=1)
    """Share of the GPU's memory that the engine may take (GPU only)."""
    kv_cache_memory_bytes: PositiveInt | None = None
    """Bytes of key/value cache; null lets vLLM measure (GPU) or takes 256 MiB (CPU)."""
    max_model_len: PositiveInt | None = None
    """Prompt and response tokens the engine accepts; null takes policy.max_total_sequence_length."""
    enforce_eager: bool = False
    """No CUDA graphs and no compilation."""
    env_vars: dict[str, str] | None = None
    """Environment variables of the generation workers; null sets none."""


class ColocatedResources(Section):
    """Devices of the generator when it does not share the trainer's."""

    gpus_per_node: PositiveInt | None = None
    """Devices on each node for generation; null takes all of the node."""
    num_nodes: PositiveInt | None = None
    """Nodes for generation; null splits within one node."""


class ColocatedConfig(Section):
    """Whether trainer and generator take turns on the same devices."""

    enabled: bool = True
    """True: the same devices, in turns (sync). False: devices of its own (async)."""
    resources: ColocatedResources = Field(default_factory=ColocatedResources)
    """The generator's devices when not colocated."""


class GenerationConfig(Section):
    """`policy.generation`: sampling and engine."""

    backend: Literal["vllm"] = "vllm"
    """The generator."""
    max_new_tokens: PositiveInt = 512
    """Response tokens of one sample at most."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; training log-probabilities use the same."""
    top_p: float = Field(1.0, ge=1, le=1)
    """Nucleus sampling is refused in training: the trainer cannot reproduce truncated probabilities."""
    top_k: None = None
    """Top-k sampling is refused in training, for the same reason."""
    val_temperature: float = Field(0.0, ge=0)
    """Sampling temperature of validation; 0 is greedy."""
    stop_token_ids: list[int] | None = None
    """Token ids that end a response, besides the tokenizer's end-of-sequence."""
    stop_strings: list[str] | None = None
    """Strings that end a response."""
    vllm_cfg: VllmConfig = Field(default_factory=VllmConfig)
    """The vLLM engine."""
    vllm_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vllm.LLM, passed as they are."""
    colocated: ColocatedConfig = Field(default_factory=ColocatedConfig)
    """Placement of the generator."""
