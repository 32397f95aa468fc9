"""A Qwen3 model (dense or mixture of experts) as megatron-core's GPTModel."""

from __future__ import annotations

from typing import Any

import torch

from nemo_rl_moe.errors import UserError
from nemo_rl_moe.policy.megatron.model_shape import ModelShape, read_hf_config
from nemo_rl_moe.policy.megatron.parallel import ParallelLayout
from nemo_rl_moe.policy.megatron.versions import dispatcher_settings, installed_version
from nemo_rl_moe.recipe.schema.policy import MegatronConfig, PolicyConfig

__all__ = ["ModelShape", "build_model", "padded_vocab_size", "read_hf_config", "transformer_config"]


def padded_vocab_size(shape: ModelShape, layout: ParallelLayout) -> int:
    """Rows of embedding and head: the vocabulary rounded up to a multiple of the tensor-parallel size."""
    return -(-shape.vocab_size // layout.tp_size) * layout.tp_size


def build_model(shape: ModelShape, policy: PolicyConfig, layout: ParallelLayout) -> list[Any]:
    """This rank's part of the model, one GPTModel, with weights still to be loaded.

    Megatron's parallel state must be initialized. Parameters lie on the GPU where there is one. Each chunk carries the
    shape as `hf_shape`.

    Call a chunk with `input_ids` and `position_ids` int64 [B, S], counted from 0 in each sequence, and `attention_mask`
    (None is causal; on a CPU also bool [B, 1, S, S], True where a query must not see a key). For packed sequences B is
    1 and `packed_seq_params`, of format thd, gives their boundaries. It returns logits [B, S, padded vocabulary / tp]
    on the last pipeline stage.

    Raises:
        UserError: the layout does not fit the model.
    """
    from megatron.core.models.gpt import GPTModel

    on_gpu = torch.cuda.is_available()
    config = transformer_config(shape, policy, layout, torch.device("cuda" if on_gpu else "cpu"))
    model = GPTModel(
        config=config,
        transformer_layer_spec=_block_spec(config, use_transformer_engine=on_gpu),
        vocab_size=padded_vocab_size(shape, layout),
        max_sequence_length=shape.max_position_embeddings,
        pre_process=layout.is_first_stage,
        post_process=layout.is_last_stage,
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        parallel_output=True,
    )
    _mark_split_weights(model)
    if not on_gpu:
        _use_given_positions(model, shape)
    if policy.megatron_cfg.freeze_moe_router:
        for name, parameter in model.named_parameters():
            if ".router." in name:
                parameter.requires_grad_(False)
    model.hf_shape = shape
    return [model.cuda(torch.cuda.current_device()) if on_gpu else model]


def transformer_config(shape: ModelShape, policy: PolicyConfig, layout: ParallelLayout, device: torch.device) -> Any:
    """Megatron's TransformerConfig of the model under the recipe's settings.

    Raises:
        UserError: the layout does not fit the model.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    cfg = policy.megatron_cfg
    check_layout(shape, cfg)
    dtype = getattr(torch, policy.precision)
    on_gpu = device.type == "cuda"
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=False,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        # Every weight is loaded, so none needs random numbers first.
        perform_initialization=False,
        use_cpu_initialization=not on_gpu,
        # Fused kernels: the local spec has none of them.
        masked_softmax_fusion=on_gpu,
        bias_activation_fusion=cfg.bias_activation_fusion,
        bias_dropout_fusion=False,
        apply_rope_fusion=cfg.apply_rope_fusion,
        gradient_accumulation_fusion=False,
        persist_layer_norm=on_gpu,
        moe_enable_routing_replay=policy.router_replay.enabled and bool(shape.num_experts),
        **_parallel_settings(cfg),
        **_moe_settings(shape, cfg),
    )


def _parallel_settings(cfg: MegatronConfig) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "tensor_model_parallel_size": cfg.tensor_model_parallel_size,
        "pipeline_model_parallel_size": cfg.pipeline_model_parallel_size,
        "context_parallel_size": cfg.context_parallel_size,
        "expert_model_parallel_size": cfg.expert_model_parallel_size,
        "expert_tensor_parallel_size": cfg.expert_tensor_parallel_size,
        "sequence_parallel": cfg.sequence_parallel and cfg.tensor_model_parallel_size > 1,
        "num_layers_in_first_pipeline_stage": cfg.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": cfg.num_layers_in_last_pipeline_stage,
    }
    if cfg.activation_checkpointing:
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return settings


def _moe_settings(shape: ModelShape, cfg: MegatronConfig) -> dict[str, Any]:
    if not shape.num_experts:
        return {}
    return {
        "num_moe_experts": shape.num_experts,
        "moe_ffn_hidden_size": shape.moe_ffn_size,
        "moe_layer_freq": [int(is_moe) for is_moe in shape.moe_layers],
        "moe_router_topk": shape.experts_per_token,
        # Softmax over all experts and then top-k is, once the chosen are normalised, the softmax over the top-k logits.
        "moe_router_pre_softmax": not shape.norm_topk_prob,
        "moe_router_dtype": cfg.moe_router_dtype,
        "moe_router_load_balancing_type": cfg.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": cfg.moe_aux_loss_coeff,
        "moe_permute_fusion": cfg.moe_permute_fusion,
        "moe_grouped_gemm": cfg.moe_grouped_gemm,
        **dispatcher_settings(cfg, installed_version()),
    }


def _block_spec(config: Any, use_transformer_engine: bool) -> Any:
    """The layers of this pipeline stage; without Transformer Engine, with our modules in the places it would take."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    spec = get_gpt_decoder_block_spec(config, use_transformer_engine, normalization="RMSNorm")
    if use_transformer_engine:
        return spec
    from nemo_rl_moe.policy.megatron.local_modules import LocalAttention, RMSNorm

    spec.layer_norm = RMSNorm
    for layer in spec.layer_specs:
        layer.submodules.input_layernorm = RMSNorm
        layer.submodules.pre_mlp_layernorm = RMSNorm
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = RMSNorm
        attention.core_attention = LocalAttention
    return spec


def _mark_split_weights(model: Any) -> None:
    """Marks the weights that tensor parallelism splits, as Megatron does only when it also initializes them.

    Without the mark its gradient norm takes a rank's part for a copy of rank 0's and leaves it out.
    """
    from megatron.core.tensor_parallel import layers

    for module in model.modules():
        if isinstance(module, layers.ColumnParallelLinear | layers.VocabParallelEmbedding):
            dimension = 0
        elif isinstance(module, layers.RowParallelLinear):
            dimension = 1
        else:
            continue
        # A tied head has no weight of its own; where it has one, on another stage, it is the embedding's copy.
        if module.weight is not None and not hasattr(module.weight, "tensor_model_parallel"):
            layers.set_tensor_model_parallel_attributes(module.weight, True, dimension, 1)


def _use_given_positions(model: Any, shape: ModelShape) -> None:
    from nemo_rl_moe.policy.megatron.local_modules import PositionedRotaryEmbedding

    model.rotary_pos_emb = PositionedRotaryEmbedding(
        kv_channels=shape.head_dim,
        rotary_percent=1.0,
        rotary_base=shape.rope_theta,
        use_cpu_initialization=True,
        cp_group=model.rotary_pos_emb.cp_group,
    )
    model.rotary_pos_emb.attach(model)


def check_layout(shape: ModelShape, cfg: MegatronConfig) -> None:
    """Refuses layouts that cannot split the model, and those that Megatron trains wrongly without a word.

    Raises:
        UserError: with the setting, its value and what the model asks for.
    """
    tp, pp = cfg.tensor_model_parallel_size, cfg.pipeline_model_parallel_size
    ep, etp = cfg.expert_model_parallel_size, cfg.expert_tensor_parallel_size
    _must_divide("tensor_model_parallel_size", tp, "attention heads", shape.num_heads)
    if shape.num_kv_heads % tp and tp % shape.num_kv_heads:
        raise UserError(
            f"policy.megatron_cfg.tensor_model_parallel_size: {tp}, expected a divisor or a multiple of the model's "
            f"{shape.num_kv_heads} key/value heads"
        )
    if not all(shape.moe_layers):
        _must_divide("tensor_model_parallel_size", tp, "intermediate_size", shape.ffn_size)
    first, last = cfg.num_layers_in_first_pipeline_stage, cfg.num_layers_in_last_pipeline_stage
    stages = pp - (first is not None) - (last is not None)
    layers = shape.num_layers - (first or 0) - (last or 0)
    if layers < 0 or (layers % stages or layers == 0 if stages > 0 else layers):
        raise UserError(
            f"policy.megatron_cfg.pipeline_model_parallel_size: {pp} stages cannot share {shape.num_layers} layers "
            f"(first stage {first or 'even'}, last stage {last or 'even'})"
        )
    if not shape.num_experts:
        if ep > 1:
            raise UserError(
                f"policy.megatron_cfg.expert_model_parallel_size: {ep}, but the model has no experts; expected 1"
            )
        return
    _must_divide("expert_model_parallel_size", ep, "experts", shape.num_experts)
    _must_divide("expert_tensor_parallel_size", etp, "moe_intermediate_size", shape.moe_ffn_size)
    if tp > 1 and etp == 1 and ep == 1:
        # Megatron then reduces expert gradients over the dense data-parallel group: copies of the experts drift apart.
        raise UserError(
            f"policy.megatron_cfg: tensor_model_parallel_size {tp} with expert_tensor_parallel_size 1 and "
            "expert_model_parallel_size 1 trains the experts wrongly; set one of the two to "
            f"{tp} or a multiple of it"
        )
    if tp > 1 and not cfg.sequence_parallel:
        raise UserError(
            f"policy.megatron_cfg.sequence_parallel: false, but a model with experts needs it under "
            f"tensor_model_parallel_size {tp}; expected true"
        )


def _must_divide(key: str, value: int, what: str, amount: int) -> None:
    if amount % value:
        raise UserError(f"policy.megatron_cfg.{key}: {value}, expected a divisor of the model's {amount} {what}")
