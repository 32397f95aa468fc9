"""`policy`: the model that is trained, how it is laid out over devices, and its optimizer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from nemo_rl_moe.recipe.schema.base import Section
from nemo_rl_moe.recipe.schema.generation import GenerationConfig

GraphScope = Literal["attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"]
StateFormat = Literal["fp32", "bf16"]
RecomputeModule = Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]


class TokenizerConfig(Section):
    """Which tokenizer turns text into ids."""

    name: str | None = None
    """Folder or hub id of the tokenizer; null takes `policy.model_name`."""
    chat_template: str | None = None
    """Jinja chat template that replaces the tokenizer's own; null keeps it."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra variables given to the chat template, such as `enable_thinking`."""
    pad_token: str | None = None
    """Token of the vocabulary to take as padding; null keeps the tokenizer's own."""


class SequencePackingConfig(Section):
    """Several sequences in one row of the micro-batch, kept apart by a block-diagonal mask."""

    enabled: bool = True
    """Pack sequences; off means one padded row for each sequence."""
    train_mb_tokens: PositiveInt | None = None
    """Tokens at most in one packed training micro-batch; null is max_total_sequence_length x train_micro_batch_size."""
    logprob_mb_tokens: PositiveInt | None = None
    """Tokens at most in one packed log-probability micro-batch; null is as for training, with logprob_batch_size."""
    share_prompts: bool = False
    """Sequences with the same prompt hold it once in a row, so that it is computed once for all of them (CPU only)."""
    algorithm: Literal["first_fit_decreasing"] = "first_fit_decreasing"
    """How sequences are put into micro-batches."""
    microbatch_order: Literal["packer", "largest_first"] = "packer"
    """Order of the packed micro-batches: as packed, or the largest first (peak memory shows in the first one)."""
    fuse_loss: bool = False
    """One loss call for a packed micro-batch instead of one for each sequence."""


class RouterReplayConfig(Section):
    """`policy.router_replay`: tokens are trained in the experts that an earlier pass chose for them."""

    enabled: bool = False
    """Record each token's experts and replay them where the policy is trained; the reference keeps its own."""
    source: Literal["logprob"] = "logprob"
    """Whose experts: those of the trainer's own log-probability pass before the update."""
    measure_only: bool = False
    """Train with the trainer's own experts, and only log how often the recorded ones are the same."""


class OptimizerConfig(Section):
    """Megatron's optimizer."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """Update rule; adam is AdamW (decoupled weight decay)."""
    lr: PositiveFloat = 5.0e-6
    """Peak learning rate."""
    min_lr: NonNegativeFloat = 5.0e-7
    """Learning rate at the end of the decay."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of Adam's first moment."""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of Adam's second moment."""
    adam_eps: PositiveFloat = 1.0e-8
    """Added to Adam's denominator."""
    sgd_momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of sgd."""
    use_distributed_optimizer: bool = True
    """Shard optimizer state over the data-parallel ranks (ZeRO-1)."""
    use_precision_aware_optimizer: bool = False
    """Keep optimizer state in the formats that Transformer Engine's fused Adam allows (GPU only)."""
    exp_avg_dtype: StateFormat = "fp32"
    """Format of Adam's first moment; other than fp32 needs use_precision_aware_optimizer."""
    exp_avg_sq_dtype: StateFormat = "fp32"
    """Format of Adam's second moment, likewise."""
    optimizer_cpu_offload: bool = False
    """Keep optimizer state in host memory and step there (GPU only)."""
    optimizer_offload_fraction: float = Field(0.0, ge=0, le=1)
    """Share of the optimizer state that is offloaded."""


class SchedulerConfig(Section):
    """Learning rate over optimizer steps."""

    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""
    lr_warmup_iters: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    lr_warmup_init: NonNegativeFloat = 0.0
    """Learning rate at the first warm-up step."""
    lr_decay_iters: PositiveInt = 1000
    """Optimizer step at which min_lr is reached."""


class DdpConfig(Section):
    """Megatron's DistributedDataParallel."""

    overlap_grad_reduce: bool = False
    """Reduce gradient buckets while backward still runs."""
    overlap_param_gather: bool = False
    """Gather updated parameters while the next forward runs; needs the distributed optimizer."""
    grad_reduce_in_fp32: bool = False
    """Accumulate and reduce gradients in float32."""


class Fp8Config(Section):
    """Training in fp8 through Transformer Engine."""

    enabled: bool = False
    """Train in fp8."""
    fp8: Literal["e4m3", "hybrid"] = "e4m3"
    """Format: e4m3 everywhere, or e5m2 for gradients (hybrid)."""
    fp8_recipe: Literal["blockwise", "tensorwise", "delayed", "mxfp8"] = "blockwise"
    """How scales are kept: for each block (Hopper), each tensor, from history, or for each 32 values (Blackwell)."""
    fp8_param: bool = False
    """Keep parameters in fp8 too; needs the distributed optimizer."""


class MegatronConfig(Section):
    """`policy.megatron_cfg`: parallel layout, mixture-of-experts and optimizer settings."""

    enabled: bool = True
    """Train with megatron-core (the only trainer)."""
    tensor_model_parallel_size: PositiveInt = 1
    """TP: ranks that share each dense matrix."""
    pipeline_model_parallel_size: PositiveInt = 1
    """PP: ranks that share the layers."""
    context_parallel_size: PositiveInt = 1
    """CP: ranks that share each sequence (GPU only)."""
    expert_model_parallel_size: PositiveInt = 1
    """EP: ranks that share the experts."""
    expert_tensor_parallel_size: PositiveInt = 1
    """ETP: ranks that share each expert's matrices."""
    num_layers_in_first_pipeline_stage: PositiveInt | None = None
    """Layers of the first pipeline stage; null divides evenly."""
    num_layers_in_last_pipeline_stage: PositiveInt | None = None
    """Layers of the last pipeline stage; null divides evenly."""
    num_layers_per_virtual_pipeline_stage: PositiveInt | None = None
    """Layers of one virtual stage (interleaved schedule); null is one chunk on each rank."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as one more layer when the layers are divided over the pipeline."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the output matrix and the loss as one more layer, likewise."""
    sequence_parallel: bool = False
    """Shard activations along the sequence between TP regions."""
    activation_checkpointing: bool = False
    """Recompute activations in backward."""
    recompute_granularity: Literal["full", "selective"] = "full"
    """What is recomputed with activation_checkpointing: whole layers, or recompute_modules."""
    recompute_modules: list[RecomputeModule] | None = None
    """Parts recomputed under selective; null is core_attn."""
    freeze_moe_router: bool = False
    """Do not train the router's weights."""
    moe_router_dtype: Literal["fp32", "fp64"] = "fp32"
    """Number format of the router's logits and probabilities."""
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss"] = "none"
    """Auxiliary balancing loss of the router."""
    moe_aux_loss_coeff: NonNegativeFloat = 0.0
    """Weight of the auxiliary balancing loss."""
    moe_router_force_load_balancing: bool = False
    """Route tokens evenly and at random instead of by the router: for benchmarks only."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """How tokens reach their experts; flex needs a GPU."""
    moe_flex_dispatcher_backend: Literal["hybridep", "deepep"] | None = None
    """Transport of the flex dispatcher; null with any other dispatcher."""
    moe_hybridep_num_sms: PositiveInt | None = None
    """Streaming multiprocessors that HybridEP takes on each GPU; null is the library's default."""
    hybridep_num_ranks_per_nvlink_domain: PositiveInt | None = None
    """EP ranks in one NVLink domain; agrees with NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN; null leaves it to that."""
    hybridep_use_mnnvl: bool | None = None
    """Multi-node NVLink between the ranks of a domain; agrees with USE_MNNVL; null leaves it to that."""
    moe_hybridep_prepad_packed_inputs: bool = False
    """Pad each packed micro-batch, before the forward pass, to the longest of its EP group."""
    moe_enable_deepep: bool = False
    """Older name of moe_flex_dispatcher_backend deepep; refused in favour of it."""
    moe_shared_expert_overlap: bool = False
    """Run shared experts beside the alltoall dispatcher's communication."""
    overlap_moe_expert_parallel_comm: bool = False
    """Run the experts' all-to-all of one micro-batch beside the computation of another (1F1B overlap)."""
    delay_wgrad_compute: bool = False
    """Compute weight gradients later, to fill that overlap; needs it."""
    moe_router_enable_expert_bias: bool = False
    """Router with a bias for each expert that balances load without an auxiliary loss."""
    moe_router_bias_update_rate: NonNegativeFloat = 0.0
    """Change of the expert bias at each optimizer step."""
    mtp_num_layers: NonNegativeInt = 0
    """Multi-token-prediction layers."""
    moe_permute_fusion: bool = False
    """Fused token permutation (Transformer Engine, GPU)."""
    moe_grouped_gemm: bool = False
    """All local experts in one grouped matrix product (Transformer Engine, GPU)."""
    apply_rope_fusion: bool = False
    """Fused rotary embedding (Transformer Engine, GPU)."""
    bias_activation_fusion: bool = False
    """Fused bias and activation."""
    gradient_accumulation_fusion: bool = False
    """Accumulate weight gradients inside the matrix product (GPU only)."""
    defer_fp32_logits: bool = False
    """Turn logits to float32 chunk by chunk instead of all at once."""
    cuda_graph_impl: Literal["none", "local", "transformer_engine"] = "none"
    """CUDA graphs of the training step."""
    cuda_graph_scope: list[GraphScope] | None = None
    """Parts of a layer that are captured; null is all that can be."""
    empty_unused_memory_level: int = Field(0, ge=0, le=2)
    """Give cached GPU memory back: never, after each step, or also between forward and backward."""
    clear_memory_caches_before_refit: bool = False
    """Clear fp8, rotary and dispatcher caches before weights are exported."""
    fp8_cfg: Fp8Config = Field(default_factory=Fp8Config)
    """Training in fp8."""
    env_vars: dict[str, str] | None = None
    """Environment variables of the policy workers; null sets none."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """Optimizer settings."""
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    """Learning-rate schedule."""
    distributed_data_parallel_config: DdpConfig = Field(default_factory=DdpConfig)
    """Gradient reduction settings."""


class PolicyConfig(Section):
    """`policy`: model, batches, lengths, trainer and generator."""

    model_name: str
    """Folder with a Hugging Face checkpoint (config.json, *.safetensors, tokenizer) or a hub id."""
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    """Tokenizer settings."""
    hf_config_overrides: dict[str, Any] = Field(default_factory=dict)
    """Keys of the model's config.json to replace before the model is built."""
    trust_remote_code: bool = False
    """Allow code from the model folder to run."""
    train_global_batch_size: PositiveInt = 512
    """Samples in one optimizer step, over all data-parallel ranks."""
    train_micro_batch_size: PositiveInt = 4
    """Samples in one training micro-batch; with packing, it sets the token budget."""
    logprob_batch_size: PositiveInt = 4
    """Samples in one log-probability micro-batch; with packing, it sets the token budget."""
    max_total_sequence_length: PositiveInt = 512
    """Prompt and response tokens of one sample at most."""
    logprob_chunk_size: PositiveInt | None = None
    """Tokens whose logits are in memory at once in log-probability passes; needs defer_fp32_logits; null takes all."""
    make_sequence_length_divisible_by: PositiveInt = 1
    """Each row of a micro-batch is padded to a multiple of this many tokens."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Number format of the trainer's weights and activations."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Gradient norm above which gradients are scaled down; 0 never scales."""
    sequence_packing: SequencePackingConfig = Field(default_factory=SequencePackingConfig)
    """Sequence packing."""
    router_replay: RouterReplayConfig = Field(default_factory=RouterReplayConfig)
    """Router replay."""
    megatron_cfg: MegatronConfig = Field(default_factory=MegatronConfig)
    """The Megatron trainer."""
    generation: GenerationConfig
    """The generator."""
