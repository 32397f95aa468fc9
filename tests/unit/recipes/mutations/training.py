"""Optimizer, number formats, overlap, graphs, router replay."""

# ruff: noqa: E501 - one mutation a line reads best as a table.

from __future__ import annotations

from tests.unit.recipes.mutations.base import (
    ALLTOALL,
    BIG,
    DENSE,
    ENV,
    FP8,
    H100,
    JUPITER,
    MEGATRON,
    MXFP8,
    SUPER,
    SYNC,
    TINY,
    UNKNOWN,
    VLLM,
    M,
    V,
)

OPTIMIZER = f"{MEGATRON}.optimizer"
REPLICATED = {
    f"{OPTIMIZER}.use_distributed_optimizer": False,
    f"{MEGATRON}.distributed_data_parallel_config.overlap_param_gather": False,
}
OFFLOADED = {f"{OPTIMIZER}.optimizer_cpu_offload": True, f"{OPTIMIZER}.optimizer_offload_fraction": 0.5}
PRECISE = {f"{OPTIMIZER}.use_precision_aware_optimizer": True}
TRAINER = [
    M("optimizer", TINY, {f"{MEGATRON}.optimizer.optimizer": "sgd"}, "use_distributed_optimizer true with optimizer sgd, expected false"),
    M("optimizer", SYNC, {f"{MEGATRON}.optimizer.optimizer_cpu_offload": True}, "0 offloads nothing"),
    M("optimizer", SYNC, {f"{MEGATRON}.optimizer.optimizer_offload_fraction": 0.5}, "has no effect while optimizer_cpu_offload is false"),
    M("learning rate", TINY, {f"{MEGATRON}.optimizer.min_lr": 1.0}, "1 is above lr "),
    M("learning rate", TINY, {f"{MEGATRON}.scheduler.lr_warmup_iters": 1000}, "1000 warm-up steps are not fewer than lr_decay_iters 1000"),
    M("gradient overlap", SYNC, {f"{MEGATRON}.distributed_data_parallel_config.overlap_grad_reduce": False}, "needs overlap_grad_reduce true"),
    M("recomputation", SYNC, {f"{MEGATRON}.recompute_granularity": "selective"}, "has no effect while activation_checkpointing is false"),
    M("recomputation", BIG, {f"{MEGATRON}.recompute_modules": ["moe_act"]}, "has no effect with recompute_granularity full"),
    M("virtual pipeline", SYNC, {f"{MEGATRON}.num_layers_per_virtual_pipeline_stage": 4}, "4 with PP 1, expected null"),
    M("virtual pipeline", DENSE, {f"{MEGATRON}.num_layers_per_virtual_pipeline_stage": 5}, "16 layers on a stage are not a multiple of 5"),
    M("virtual pipeline", BIG, {f"{MEGATRON}.num_layers_per_virtual_pipeline_stage": 4}, "cannot be combined with layer counts"),
    M("router balance", SYNC, {f"{MEGATRON}.moe_aux_loss_coeff": 0.1}, "has no effect with moe_router_load_balancing_type none"),
    M("router balance", SYNC, {f"{MEGATRON}.moe_router_load_balancing_type": "aux_loss"}, "has no effect with moe_aux_loss_coeff 0"),
    M("router balance", SYNC, {f"{MEGATRON}.moe_router_bias_update_rate": 0.1}, "has no effect while moe_router_enable_expert_bias is false"),
    M("logprob chunks", SYNC, {"policy.logprob_chunk_size": 1024}, "1024 needs defer_fp32_logits true"),
    M("batch invariance", DENSE, {"loss_fn.force_on_policy_ratio": False}, "4, but the training micro-batch is 1", "policy.logprob_batch_size", "warning"),
    M("optimizer", SYNC, {f"{OPTIMIZER}.optimizer_cpu_offload": True, f"{OPTIMIZER}.optimizer_offload_fraction": 1.0, **REPLICATED}, "offloading needs the distributed optimizer"),
    M("optimizer", SYNC, {f"{OPTIMIZER}.use_precision_aware_optimizer": True, **REPLICATED}, "needs the distributed optimizer"),
    M("optimizer", SYNC, {f"{OPTIMIZER}.exp_avg_sq_dtype": "bf16"}, "bf16 needs use_precision_aware_optimizer true"),
    M("learning rate", TINY, {f"{MEGATRON}.scheduler.lr_warmup_init": 1.0}, "1 is above lr "),
    M("gradient overlap", SYNC, {f"{OPTIMIZER}.use_distributed_optimizer": False}, "overlap_param_gather needs the distributed optimizer"),
    M("recomputation", JUPITER, {f"{MEGATRON}.moe_grouped_gemm": False}, "moe_act is recomputed in the grouped product only"),
    M("recomputation", JUPITER, {f"{MEGATRON}.activation_checkpointing": False, f"{MEGATRON}.recompute_modules": ["moe"], f"{MEGATRON}.cuda_graph_impl": "transformer_engine", f"{MEGATRON}.cuda_graph_scope": ["moe_router"]}, "has no effect while activation_checkpointing is false"),
    M("virtual pipeline", BIG, {f"{MEGATRON}.num_layers_per_virtual_pipeline_stage": 4, f"{MEGATRON}.num_layers_in_first_pipeline_stage": 10, f"{MEGATRON}.num_layers_in_last_pipeline_stage": None}, "cannot be combined with layer counts"),
    M("virtual pipeline", BIG, {f"{MEGATRON}.num_layers_per_virtual_pipeline_stage": 4, f"{MEGATRON}.num_layers_in_first_pipeline_stage": None, f"{MEGATRON}.num_layers_in_last_pipeline_stage": 10}, "cannot be combined with layer counts"),
    M("virtual pipeline", JUPITER, {"policy.train_global_batch_size": 1984}, "124 micro-batches on each rank are not a multiple of PP 8, as interleaving needs"),
]  # fmt: skip

REPLAY = {"policy.router_replay.enabled": True}

REPLAYS = [
    M("router replay", TINY, {"policy.router_replay.measure_only": True}, "has no effect while router_replay.enabled is false"),
    M("router replay", DENSE, REPLAY, "true, but the model is dense: expected false"),
    M("router replay", JUPITER, REPLAY, "true in a benchmark, where no pass records, expected false"),
    M("router replay", SYNC, {"policy.router_replay.source": "logprob", **REPLAY}, "logprob with force_on_policy_ratio, which leaves that pass out"),
    M("router replay", SYNC, {**REPLAY, "loss_fn.force_on_policy_ratio": False, f"{MEGATRON}.cuda_graph_impl": "local"}, "true with cuda_graph_impl local: a captured router replays nothing"),
]  # fmt: skip

PRECISION = [
    M("fp8 rollout keys", SYNC, {f"{VLLM}.quantization_ignore_patterns": ["q_proj"]}, "has no effect with precision auto, expected fp8"),
    M("MXFP8 rollout", MXFP8, {f"{VLLM}.quantization_ignore_patterns": None}, "expected the modules that stay in bfloat16"),
    M("MXFP8 rollout", MXFP8, {"policy.generation.vllm_kwargs.moe_backend": "triton"}, "triton with MXFP8 experts, expected flashinfer_trtllm"),
    M("MXFP8 rollout", MXFP8, {f"{VLLM}.use_deep_gemm": True}, "DeepGEMM is for blockwise fp8"),
    M("MXFP8 rollout", SYNC, {"policy.generation.vllm_kwargs.moe_backend": "flashinfer_trtllm"}, "so that a refit cannot write them, expected triton"),
    M("fp8 training", FP8, {f"{MEGATRON}.fp8_cfg.fp8_recipe": "mxfp8"}, "mxfp8 on h100, expected one of b200, gb200, gb300"),
    M("fp8 training", FP8, {f"{MEGATRON}.optimizer.use_distributed_optimizer": False, f"{MEGATRON}.fp8_cfg.fp8_param": True, f"{MEGATRON}.distributed_data_parallel_config.overlap_param_gather": False}, "fp8 parameters need the distributed optimizer", f"{MEGATRON}.fp8_cfg.fp8_param"),
    M("fp8 training", SYNC, {f"{MEGATRON}.fp8_cfg.fp8_param": True}, "has no effect while fp8_cfg.enabled is false"),
    M("fp8 training", SYNC, {f"{MEGATRON}.fp8_cfg.enabled": True}, "blockwise on gb200: Hopper's recipe, expected mxfp8"),
    M("fp8 rollout keys", H100, {f"{VLLM}.is_mx": True}, "has no effect with precision auto, expected fp8"),
    M("fp8 rollout keys", H100, {f"{VLLM}.use_deep_gemm": True}, "has no effect with precision auto, expected fp8"),
    M("fp8 rollout keys", H100, {f"{VLLM}.num_first_layers_in_bf16": 1}, "has no effect with precision auto, expected fp8"),
    M("fp8 rollout keys", H100, {f"{VLLM}.num_last_layers_in_bf16": 1}, "has no effect with precision auto, expected fp8"),
    M("MXFP8 rollout", H100, {f"{VLLM}.is_mx": True, f"{VLLM}.precision": "fp8", f"{VLLM}.quantization_ignore_patterns": ["q_proj"], "policy.generation.vllm_kwargs.moe_backend": "flashinfer_trtllm"}, "MXFP8 on h100, expected one of b200, gb200, gb300"),
    M("fp8 training", FP8, {"policy.precision": "float32"}, "fp8 training with policy.precision float32, expected bfloat16", "policy.precision"),
    M("fp8 training", FP8, {f"{MEGATRON}.fp8_cfg.fp8_param": True, **OFFLOADED}, "fp8 parameters with an offloaded optimizer need the delayed recipe, found blockwise"),
    M("fp8 training", FP8, {f"{MEGATRON}.fp8_cfg.fp8_param": True, f"{MEGATRON}.fp8_cfg.fp8_recipe": "delayed", **OFFLOADED}, "use_precision_aware_optimizer true"),
    M("fp8 training", JUPITER, {f"{MEGATRON}.fp8_cfg.fp8_recipe": "delayed"}, "layernorm and moe_act cannot be recomputed under the delayed recipe"),
]  # fmt: skip

OVERLAP = f"{MEGATRON}.overlap_moe_expert_parallel_comm"

GRAPHS = {f"{MEGATRON}.cuda_graph_impl": "transformer_engine"}

CONNECTIONS = f"{ENV}.CUDA_DEVICE_MAX_CONNECTIONS"
SEGMENTS = {f"{ENV}.PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
BENCHMARK = [
    M("pipeline layers", JUPITER, {f"{MEGATRON}.account_for_loss_in_pipeline_split": False}, "95 layers, embedding and loss counted, over PP 8: expected a whole number of layers, at least one, on each, as with PP 5 or 19"),
    M("pipeline layers", BIG, {f"{MEGATRON}.pipeline_model_parallel_size": 8, f"{MEGATRON}.num_layers_in_first_pipeline_stage": None, f"{MEGATRON}.num_layers_in_last_pipeline_stage": None}, "96 divide"),
    M("pipeline layers", BIG, {f"{MEGATRON}.account_for_loss_in_pipeline_split": True}, "cannot be combined with layer counts"),
    M("virtual pipeline", JUPITER, {f"{MEGATRON}.num_layers_per_virtual_pipeline_stage": 5}, "12 layers on a stage are not a multiple of 5, expected 4 or 6"),
    M("experts per rank", JUPITER, {f"{MEGATRON}.expert_model_parallel_size": 12, "cluster.num_nodes": 24, "policy.train_global_batch_size": 1536}, "EP 12 does not divide the model's 128 experts, expected 8 or 16"),
    M("expert world size", JUPITER, {f"{MEGATRON}.expert_model_parallel_size": 64}, "EP 64 x ETP 1 x PP 8 = 512; EP 32 would divide"),
    M("optimizer", JUPITER, {f"{MEGATRON}.optimizer.exp_avg_dtype": "bf16"}, "bf16 needs use_precision_aware_optimizer true"),
    M("all-to-all overlap", JUPITER, {f"{MEGATRON}.delay_wgrad_compute": True}, "has no effect without overlap_moe_expert_parallel_comm"),
    M("all-to-all overlap", JUPITER, {OVERLAP: True, f"{MEGATRON}.recompute_granularity": "full", f"{MEGATRON}.recompute_modules": None}, "excludes full recomputation"),
    M("all-to-all overlap", JUPITER, {OVERLAP: True, f"{MEGATRON}.recompute_modules": ["moe"]}, "excludes recomputing moe"),
    M("all-to-all overlap", JUPITER, {OVERLAP: True, f"{MEGATRON}.num_layers_per_virtual_pipeline_stage": None}, "needs num_layers_per_virtual_pipeline_stage"),
    M("CUDA graphs", JUPITER, {f"{MEGATRON}.cuda_graph_scope": ["attn"]}, "has no effect with cuda_graph_impl none"),
    M("CUDA graphs", JUPITER, {f"{MEGATRON}.cuda_graph_scope": ["moe_preprocess"], **GRAPHS}, "moe_preprocess needs moe_router"),
    M("CUDA graphs", JUPITER, {f"{MEGATRON}.cuda_graph_scope": ["mlp"], OVERLAP: True, **GRAPHS}, "cannot be captured with overlap"),
    M("forced routing", SYNC, {f"{MEGATRON}.moe_router_force_load_balancing": True}, "true in a recipe that trains, expected false"),
    M("benchmark steps", JUPITER, {"benchmark.warmup_steps": 50}, "50 warm-up steps leave none of 50 to measure"),
    M("all-to-all overlap", DENSE, {OVERLAP: True, f"{MEGATRON}.num_layers_per_virtual_pipeline_stage": 4}, "true with EP 1: there is nothing to overlap"),
    M("all-to-all overlap", H100, {OVERLAP: True, **ALLTOALL, f"{MEGATRON}.moe_token_dispatcher_type": "allgather"}, "needs dispatcher alltoall or flex"),
    M("all-to-all overlap", H100, {OVERLAP: True, "policy.precision": "float32"}, "needs precision bfloat16, found float32"),
    M("all-to-all overlap", H100, {OVERLAP: True, **ALLTOALL, f"{MEGATRON}.moe_shared_expert_overlap": True}, "excludes moe_shared_expert_overlap"),
    M("all-to-all overlap", H100, {OVERLAP: True, f"{MEGATRON}.mtp_num_layers": 2, f"{MEGATRON}.moe_hybridep_prepad_packed_inputs": False}, "allows one multi-token-prediction layer at most"),
    M("CUDA graphs", JUPITER, {f"{MEGATRON}.cuda_graph_scope": ["moe"], **GRAPHS}, "moe needs tokens dropped and padded"),
    M("CUDA graphs", JUPITER, {f"{MEGATRON}.cuda_graph_scope": ["moe_router"], f"{MEGATRON}.recompute_modules": ["moe"], **GRAPHS}, "moe_router cannot be captured where moe is recomputed"),
    M("CUDA graphs", H100, {**GRAPHS, **SEGMENTS}, 'transformer_engine graphs with expandable_segments:True need NCCL_GRAPH_REGISTER "0"'),
    M("CUDA graphs", H100, {**GRAPHS, **SEGMENTS, f"{ENV}.NCCL_GRAPH_REGISTER": "1"}, "need NCCL_GRAPH_REGISTER", f"{ENV}.NCCL_GRAPH_REGISTER"),
    M("device connections", BIG, {CONNECTIONS: "8"}, '"8" on h100 with TP or CP above 1, expected "1"', severity="warning"),
    M("device connections", BIG, {CONNECTIONS: "8", f"{MEGATRON}.tensor_model_parallel_size": 1, f"{MEGATRON}.sequence_parallel": False}, "expected \"1\" unless overlap", severity="warning"),
    M("device connections", DENSE, {CONNECTIONS: "8"}, "expected \"1\" unless overlap", severity="warning"),
]  # fmt: skip

FP8_ON = f"{MEGATRON}.fp8_cfg"
VALID = [
    V(TINY, {f"{OPTIMIZER}.optimizer": "sgd", f"{OPTIMIZER}.use_distributed_optimizer": False}),
    V(SYNC, {f"{OPTIMIZER}.optimizer": "sgd", **OFFLOADED, **REPLICATED}),
    V(SYNC, OFFLOADED),
    V(SYNC, {f"{OPTIMIZER}.exp_avg_dtype": "bf16", **PRECISE}),
    V(TINY, {f"{MEGATRON}.scheduler.lr_warmup_init": 0.001, f"{OPTIMIZER}.lr": 0.001}),
    V(DENSE, {f"{MEGATRON}.num_layers_per_virtual_pipeline_stage": 4, **UNKNOWN}),
    V(DENSE, {f"{MEGATRON}.num_layers_per_virtual_pipeline_stage": 4, "grpo.num_prompts_per_step": 1, "grpo.num_generations_per_prompt": 2}),
    V(SYNC, {f"{MEGATRON}.moe_router_load_balancing_type": "aux_loss", f"{MEGATRON}.moe_aux_loss_coeff": 0.1}),
    V(SYNC, {f"{VLLM}.precision": "fp8", "policy.generation.vllm_kwargs.moe_backend": "flashinfer_trtllm"}),
    V(SYNC, {f"{FP8_ON}.enabled": True, f"{FP8_ON}.fp8_recipe": "mxfp8"}),
    V(FP8, REPLICATED),
    V(FP8, OFFLOADED),
    V(FP8, {f"{FP8_ON}.fp8_recipe": "delayed"}),
    V(FP8, {f"{FP8_ON}.fp8_recipe": "delayed", f"{FP8_ON}.fp8_param": True, **OFFLOADED, **PRECISE}),
    V(TINY, {"policy.router_replay.measure_only": False}),
    V(H100, {**REPLAY, "loss_fn.force_on_policy_ratio": False, **UNKNOWN}),
    V(H100, {**REPLAY, "grpo.seq_logprob_error_threshold": 2.0}),
    V(H100, {OVERLAP: True}),
    V(H100, {OVERLAP: True, f"{MEGATRON}.mtp_num_layers": 1, f"{MEGATRON}.moe_hybridep_prepad_packed_inputs": False}),
    V(JUPITER, {f"{MEGATRON}.cuda_graph_scope": ["moe_router", "moe_preprocess"], **GRAPHS}),
    V(JUPITER, {f"{MEGATRON}.cuda_graph_scope": ["mlp"], **GRAPHS}),
    V(H100, {**GRAPHS, **SEGMENTS, f"{ENV}.NCCL_GRAPH_REGISTER": "0"}),
    V(H100, {f"{MEGATRON}.cuda_graph_impl": "local", **SEGMENTS}),
    V(H100, GRAPHS),
    V(BIG, {CONNECTIONS: "1"}),
    V(H100, {CONNECTIONS: "8"}),
    V(SUPER, {CONNECTIONS: "8"}),
    V(JUPITER, {CONNECTIONS: "32", OVERLAP: True}),
]  # fmt: skip
