"""Parallel layout, pipelines, placement of the generator."""

# ruff: noqa: E501 - one mutation a line reads best as a table.

from __future__ import annotations

from tests.unit.recipes.mutations.base import (
    ASYNC,
    BIG,
    DENSE,
    ENV,
    EP2,
    H100,
    HF,
    JUPITER,
    MEGATRON,
    RANKS,
    SYNC,
    TINY,
    UNKNOWN,
    UNPACKED,
    VLLM,
    M,
    V,
)

LAYOUT = [
    M("world size", DENSE, {"cluster.num_nodes": 3}, "24 training devices are not a multiple of TP 4 x PP 4 x CP 1 = 16"),
    M("world size", EP2, {"cluster.gpus_per_node": 3, f"{MEGATRON}.pipeline_model_parallel_size": 2}, "3 training devices", f"{MEGATRON}.pipeline_model_parallel_size"),
    M("expert world size", H100, {f"{MEGATRON}.expert_model_parallel_size": 64}, "32 training devices are not a multiple of EP 64 x ETP 1 x PP 1 = 64"),
    M("experts per rank", EP2, {f"{MEGATRON}.expert_model_parallel_size": 3, "cluster.gpus_per_node": 3, "policy.train_global_batch_size": 3, "grpo.num_prompts_per_step": 3}, "EP 3 does not divide the model's 8 experts"),
    M("experts per rank", DENSE, {f"{MEGATRON}.expert_model_parallel_size": 2}, "EP 2, but the model is dense: expected 1"),
    M("expert replicas", EP2, {f"{MEGATRON}.expert_model_parallel_size": 1, f"{MEGATRON}.tensor_model_parallel_size": 2, f"{MEGATRON}.sequence_parallel": True, "policy.make_sequence_length_divisible_by": 2}, "expected ETP 2 or EP above 1", f"{MEGATRON}.tensor_model_parallel_size"),
    M("sequence parallel", EP2, {f"{MEGATRON}.tensor_model_parallel_size": 2}, "false with TP 2 on a mixture of experts, expected true"),
    M("sequence parallel", EP2, {f"{MEGATRON}.sequence_parallel": True}, "true with TP 1: there is nothing to shard"),
    M("heads", DENSE, {f"{MEGATRON}.tensor_model_parallel_size": 128, "cluster.num_nodes": 64, "policy.make_sequence_length_divisible_by": 128}, "TP 128 does not divide the model's 64 attention heads"),
    M("heads", EP2, {f"{MEGATRON}.tensor_model_parallel_size": 3, "cluster.gpus_per_node": 6, f"{MEGATRON}.sequence_parallel": True, "policy.make_sequence_length_divisible_by": 3, "policy.max_total_sequence_length": 63}, "TP 3 does not divide the model's 4 attention heads"),
    M("pipeline layers", BIG, {f"{MEGATRON}.num_layers_in_first_pipeline_stage": 12}, "71 remaining layers over 6 stages"),
    M("pipeline layers", EP2, {f"{MEGATRON}.num_layers_in_last_pipeline_stage": 1}, "1 with PP 1, expected null"),
    M("world size", DENSE, {"cluster.num_nodes": 7}, "56 training devices are not a multiple of TP 4 x PP 4 x CP 1 = 16"),
    M("world size", DENSE, {"cluster.gpus_per_node": 5, "cluster.num_nodes": 1, f"{VLLM}.tensor_parallel_size": 1}, "5 training devices are not a multiple of TP 4 x PP 4 x CP 1 = 16"),
    M("world size", JUPITER, {"cluster.num_nodes": 63}, "252 training devices are not a multiple of TP 2 x PP 8 x CP 1 = 16"),
    M("world size", TINY, {"cluster.gpus_per_node": 3, f"{MEGATRON}.pipeline_model_parallel_size": 2, **UNPACKED}, "3 training devices are not a multiple of TP 1 x PP 2 x CP 1 = 2", f"{MEGATRON}.pipeline_model_parallel_size"),
    M("expert world size", H100, {f"{MEGATRON}.expert_tensor_parallel_size": 3}, "32 training devices are not a multiple of EP 8 x ETP 3 x PP 1 = 24"),
    M("experts per rank", DENSE, {f"{MEGATRON}.expert_model_parallel_size": 2, f"{MEGATRON}.sequence_parallel": False}, "EP 2, but the model is dense"),
    M("experts per rank", SYNC, {f"{MEGATRON}.expert_model_parallel_size": 2, f"{ENV}.{RANKS}": "2", HF: {"num_experts": 127}}, "EP 2 does not divide the model's 127 experts"),
    M("sequence parallel", H100, {f"{MEGATRON}.tensor_model_parallel_size": 2, **UNKNOWN}, "false with TP 2 on a mixture of experts"),
    M("sequence parallel", DENSE, {f"{MEGATRON}.sequence_parallel": False, f"{MEGATRON}.expert_tensor_parallel_size": 2, **UNKNOWN}, "false with TP 4 on a mixture of experts"),
    M("heads", DENSE, {f"{VLLM}.tensor_parallel_size": 2, HF: {"num_attention_heads": 24, "num_key_value_heads": 6}}, "TP 4 neither divides nor is a multiple of 6 key/value heads", f"{MEGATRON}.tensor_model_parallel_size"),
    M("pipeline layers", TINY, {f"{MEGATRON}.num_layers_in_first_pipeline_stage": 1, f"{MEGATRON}.num_layers_in_last_pipeline_stage": 2, f"{MEGATRON}.pipeline_model_parallel_size": 2, "cluster.gpus_per_node": 2}, "first and last stage hold 1 + 2 of 2 layers"),
    M("pipeline layers", BIG, {f"{MEGATRON}.num_layers_in_first_pipeline_stage": 47, f"{MEGATRON}.num_layers_in_last_pipeline_stage": 47}, "0 remaining layers over 6 stages"),
    M("pipeline layers", BIG, {f"{MEGATRON}.num_layers_in_first_pipeline_stage": 13}, "70 remaining layers over 6 stages: expected a whole number of layers, at least one, on each"),
    M("pipeline layers", BIG, {f"{MEGATRON}.num_layers_in_first_pipeline_stage": None, f"{MEGATRON}.num_layers_in_last_pipeline_stage": None, HF: {"num_hidden_layers": 93}}, "93 layers over PP 8"),
    M("pipeline layers", JUPITER, {f"{MEGATRON}.account_for_loss_in_pipeline_split": False, HF: {"num_hidden_layers": 93}}, "94 layers, embedding and loss counted, over PP 8"),
    M("pipeline layers", BIG, {f"{MEGATRON}.account_for_embedding_in_pipeline_split": True}, "cannot be combined with layer counts"),
]  # fmt: skip

PLACEMENT = [
    M("generation devices", ASYNC, {"policy.generation.colocated.resources.num_nodes": 4}, "expected 1 to 3 of 4 nodes"),
    M("generation devices", ASYNC, {"policy.generation.colocated.resources.gpus_per_node": 5}, "5 devices on a node that has 4"),
    M("generation devices", EP2, {"policy.generation.colocated.enabled": False}, "expected 1 to 1 of the node's 2 devices"),
    M("vLLM devices", H100, {f"{VLLM}.tensor_parallel_size": 16, f"{VLLM}.expert_parallel_size": 96}, "32 generation devices are not a multiple of the engine's 96"),
    M("vLLM experts", ASYNC, {f"{VLLM}.expert_parallel_size": 8}, "EP 8 above TP 1 runs vLLM's own data parallelism"),
    M("vLLM heads", H100, {f"{VLLM}.tensor_parallel_size": 64, "cluster.num_nodes": 8}, "TP 64 does not divide the model's 32 attention heads"),
    M("async placement", ASYNC, {"policy.generation.colocated.enabled": True, "cluster.segment_size": 4}, "true with async_grpo, expected false"),
    M("async placement", ASYNC, {f"{VLLM}.async_engine": False}, "false with async_grpo, expected true"),
    M("async placement", ASYNC, {"loss_fn.use_importance_sampling_correction": False}, "samples come from older weights"),
    M("async placement", SYNC, {f"{VLLM}.pipeline_parallel_size": 2}, "PP above 1 needs async_engine true"),
    M("async placement", ASYNC, {"grpo.async_grpo.in_flight_weight_updates": False, "grpo.async_grpo.max_trajectory_age_steps": 2}, "age 2 without in_flight_weight_updates", severity="warning"),
    M("generation devices", EP2, {"policy.generation.colocated.resources.num_nodes": 2, "policy.generation.colocated.enabled": False}, "2 of 1 node, expected 1 or null"),
    M("generation devices", EP2, {"policy.generation.colocated.resources.gpus_per_node": 2, "policy.generation.colocated.enabled": False}, "expected 1 to 1 of the node's 2 devices"),
    M("generation devices", H100, {"policy.generation.colocated.enabled": False}, "expected 1 to 3 of 4 nodes"),
    M("vLLM experts", H100, {f"{VLLM}.expert_parallel_size": 2, f"{VLLM}.tensor_parallel_size": 4}, "EP 2 is not a multiple of TP 4"),
    M("vLLM heads", H100, {f"{VLLM}.tensor_parallel_size": 4, HF: {"num_attention_heads": 24, "num_key_value_heads": 6}}, "TP 4 neither divides nor is a multiple of 6 key/value heads"),
    M("async placement", ASYNC, {"grpo.use_dynamic_sampling": True}, "true with async_grpo, expected false"),
]  # fmt: skip

FIRST_AND_LAST = {
    f"{MEGATRON}.num_layers_in_first_pipeline_stage": 1,
    f"{MEGATRON}.num_layers_in_last_pipeline_stage": 1,
}
VALID = [
    V(EP2, {f"{MEGATRON}.expert_model_parallel_size": 1, f"{MEGATRON}.tensor_model_parallel_size": 2, f"{MEGATRON}.expert_tensor_parallel_size": 2, f"{MEGATRON}.sequence_parallel": True, "policy.make_sequence_length_divisible_by": 2}),
    V(DENSE, {f"{MEGATRON}.sequence_parallel": False}),
    V(DENSE, {f"{MEGATRON}.sequence_parallel": False, **UNKNOWN}),
    V(BIG, UNKNOWN),
    V(H100, UNKNOWN),
    V(TINY, {**FIRST_AND_LAST, f"{MEGATRON}.pipeline_model_parallel_size": 2, "cluster.gpus_per_node": 2}),
    V(EP2, {"policy.generation.colocated.enabled": False, "policy.generation.colocated.resources": {"num_nodes": 1, "gpus_per_node": 1}, f"{MEGATRON}.expert_model_parallel_size": 1}),
    V(ASYNC, {"policy.generation.colocated.resources.gpus_per_node": None}),
    V(SYNC, {f"{VLLM}.pipeline_parallel_size": 2, f"{VLLM}.async_engine": True}),
    V(H100, {f"{VLLM}.tensor_parallel_size": 8}),
]  # fmt: skip
