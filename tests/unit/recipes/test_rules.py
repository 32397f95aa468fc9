"""Mutation test: each rule is broken once in a valid recipe; exactly that problem is reported, at the line that broke it.

Risk: a rule that never fires, one that fires for a neighbour's mistake, one that points at the wrong line.
"""

# ruff: noqa: E501 - one mutation a line reads best as a table.

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from nemo_rl_moe.recipe.load import load_recipe
from nemo_rl_moe.recipe.rules import RULES
from nemo_rl_moe.recipe.scoring import environment_name
from tests.unit.recipes.writing import CONFIGS, PERFORMANCE, TINY, problems_of

EP2 = TINY.with_name("grpo-tiny-moe-cpu-ep2.yaml")
SYNC = PERFORMANCE / "grpo-qwen3-30ba3b-4n4g.yaml"
ASYNC = PERFORMANCE / "grpo-qwen3-30ba3b-4n4g-async-1off.yaml"
JUPITER = CONFIGS / "recipes/llm/pretrain/megatron_moe_qwen235BA22B.yaml"
MXFP8 = PERFORMANCE / "grpo-qwen3-30ba3b-4n4g-mxfp8-rollout.yaml"
H100 = PERFORMANCE / "grpo-qwen3-30ba3b-4n8g.yaml"
DENSE = PERFORMANCE / "grpo-qwen3-32b-4n8g.yaml"
BIG = PERFORMANCE / "grpo-qwen3-235b-32n8g.yaml"
SUPER = PERFORMANCE / "grpo-nemotron3-super-120BA12B-32n4g.yaml"
FP8 = PERFORMANCE / "grpo-llama3.1-8b-instruct-2n8g-fp8-async-1off.yaml"

MEGATRON, VLLM = "policy.megatron_cfg", "policy.generation.vllm_cfg"
ENV = f"{MEGATRON}.env_vars"
RANKS = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"
OFF = {"data.validation": None}


@dataclass
class Mutation:
    """Keys laid over a valid recipe; the first one is to blame."""

    rule: str
    base: Path
    keys: dict
    message: str
    blamed: str | None = None
    severity: str = "error"

    @property
    def path(self) -> str:
        return self.blamed or next(iter(self.keys))


def M(rule, base, keys, message, blamed=None, severity="error"):
    return Mutation(rule, base, keys, message, blamed, severity)


ENGINE = [
    M(
        "vLLM arguments",
        TINY,
        {"policy.generation.vllm_kwargs": {"logprobs_mode": "raw_logprobs"}},
        "the run sets vLLM's logprobs_mode itself",
        "policy.generation.vllm_kwargs.logprobs_mode",
    ),
]
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
]  # fmt: skip
BATCHES = [
    M("train batch", TINY, {"policy.train_global_batch_size": 100}, "16 prompts x 8 generations = 128 samples are not a multiple of the train batch 100"),
    M("data-parallel batch", H100, {"policy.train_global_batch_size": 16, "loss_fn.force_on_policy_ratio": False}, "16 is not a multiple of DP 32"),
    M("micro-batch", TINY, {"policy.train_micro_batch_size": 3, "policy.sequence_packing.enabled": False}, "128 samples on each rank are not a multiple of the micro-batch 3"),
    M("on-policy ratio", SYNC, {"policy.train_global_batch_size": 512}, "force_on_policy_ratio needs one optimizer step: 2048 samples a step, train batch 512"),
    M("sequence length", TINY, {"policy.generation.max_new_tokens": 65}, "65 response tokens are more than max_total_sequence_length 64"),
    M("sequence length", TINY, {"data.max_input_seq_length": 64}, "64 prompt tokens leave no room for a response in 64"),
    M("sequence length", TINY, {f"{VLLM}.max_model_len": 63}, "the engine accepts 63 tokens, fewer than max_total_sequence_length 64"),
    M("sequence length", TINY, {f"{VLLM}.max_model_len": 128, "policy.generation.max_new_tokens": 32}, "prompt 48 + response 32 tokens, engine limit 128: more than 64"),
    M("sequence length", TINY, {"policy.max_total_sequence_length": 2048}, "2048 tokens, but the model's positions end at 1024"),
    M("divisible length", TINY, {"policy.make_sequence_length_divisible_by": 7}, "64 is not a multiple of 7", severity="error"),
    M("divisible length", BIG, {"policy.make_sequence_length_divisible_by": 4}, "4 is not a multiple of 8 (TP 2 x 2CP 4)"),
    M("packing budget", TINY, {"policy.sequence_packing.logprob_mb_tokens": 63}, "63 tokens are fewer than max_total_sequence_length 64"),
    M("shared prompts", TINY, {"policy.sequence_packing.share_prompts": True, "policy.sequence_packing.enabled": False, "policy.train_micro_batch_size": 8, "policy.logprob_batch_size": 8}, "expected enabled true"),
    M("validation size", TINY, {"grpo.max_val_samples": 16, "grpo.val_batch_size": 5}, "16 samples in batches of 5: the last has 1; rounding down would score 15", severity="note"),
]  # fmt: skip
OBJECTIVE = [
    M("sequence ratios", TINY, {"loss_fn.sequence_level_importance_ratios": True}, "expected token_level_loss false"),
    M("reference", TINY, {"grpo.skip_reference_policy_logprobs_calculation": True}, "the reference is skipped, but reference_policy_kl_penalty is 0.01, expected 0"),
    M("importance correction", TINY, {"loss_fn.truncated_importance_sampling_type": "tis"}, "has no effect while use_importance_sampling_correction is false"),
    M("importance correction", TINY, {"loss_fn.truncated_importance_sampling_type": "tis", "loss_fn.use_importance_sampling_correction": True}, "tis needs truncated_importance_sampling_ratio"),
    M("importance correction", TINY, {"loss_fn.truncated_importance_sampling_type": "icepop", "loss_fn.use_importance_sampling_correction": True, "loss_fn.truncated_importance_sampling_ratio": 2.0}, "icepop needs truncated_importance_sampling_ratio_min"),
    M("importance correction", TINY, {"loss_fn.truncated_importance_sampling_ratio": 2.0, "loss_fn.use_importance_sampling_correction": True}, "has no effect without a type"),
    M("importance correction", TINY, {"loss_fn.truncated_importance_sampling_ratio_min": 3.0, "loss_fn.truncated_importance_sampling_ratio": 2.0, "loss_fn.use_importance_sampling_correction": True, "loss_fn.truncated_importance_sampling_type": "icepop"}, "the lower bound 3 is above the upper bound 2"),
    M("advantage clip", TINY, {"grpo.advantage_clip_low": 1.0, "grpo.advantage_clip_high": -1.0}, "1 is above the high bound -1"),
    M("reward scaling", TINY, {"grpo.reward_scaling.source_min": 2.0, "grpo.reward_scaling.enabled": True}, "source_min 2 is not below source_max 1"),
    M("overlong penalty", TINY, {"grpo.reward_shaping.overlong_buffer_length": 17, "grpo.reward_shaping.enabled": True}, "17 tokens, but responses end at 16"),
    M("group size", TINY, {"grpo.num_generations_per_prompt": 1}, "every advantage of a group of one is 0, expected 2 or more"),
    M("environment", TINY, {"data.train.env_name": "aritmetic"}, "'aritmetic' is no environment, expected one of ['arithmetic']; did you mean arithmetic?"),
    M("environment", TINY, {"data.validation.env_name": "x"}, "'x' is no environment, expected one of ['arithmetic']"),
    M("environment", TINY, {"data.default.env_name": "x", "data.train.env_name": "arithmetic", "data.validation.env_name": "arithmetic"}, "'x' is no environment"),
    M("environment", TINY, {"env": {"_override_": True}}, "no environment, expected one that scores the responses"),
    M("environment", TINY, {"data.train.env_name": None, "data.default.env_name": None, "data.validation.env_name": "more", "env.more.verifier": "math_verify"}, "no environment, expected one of ['arithmetic', 'more'] here or in data.default"),
    M("environment", TINY, {"data.validation.env_name": None, "data.default.env_name": None, "data.train.env_name": "more", "env.more.verifier": "math_verify"}, "no environment, expected one of ['arithmetic', 'more'] here or in data.default"),
    M("dataset", TINY, {"data.train.dataset_name": "jsonl", "data.train.task": None}, "dataset_name jsonl needs path"),
    M("dataset", TINY, {"data.train.path": "x.jsonl"}, "has no effect with dataset_name reasoning_gym"),
]  # fmt: skip
RANKED = {"checkpointing.metric_name": "validation/accuracy", "checkpointing.enabled": True}
CHECKPOINTS = [
    M("checkpoint metric", TINY, {"checkpointing.metric_name": "val:accuracy"}, "'val:accuracy': expected train/<metric> or validation/<metric>"),
    M("checkpoint metric", TINY, {"checkpointing.metric_name": "validation/acuracy"}, "no such metric; did you mean validation/accuracy?"),
    M("checkpoint metric", TINY, {"checkpointing.metric_name": "validation/accuracy", "checkpointing.enabled": True, **OFF}, "validation/accuracy is never logged: data.validation is null"),
    M("checkpoint metric", TINY, {"checkpointing.metric_name": "validation/accuracy/maths", "checkpointing.enabled": True, "checkpointing.save_period": 20}, "never logged: arithmetic scores data.validation, expected validation/accuracy/arithmetic"),
    M("checkpoint metric", TINY, {"checkpointing.metric_name": "train/dynamic_sampling_groups", "checkpointing.enabled": True}, "never logged: use_dynamic_sampling is false"),
    M("checkpoint metric", TINY, {"grpo.val_period": 0, "grpo.val_at_end": False, **RANKED}, "never logged: val_period is 0 and val_at_end false", "checkpointing.metric_name"),
    M("checkpoint metric", TINY, {"grpo.val_period": 0, "grpo.val_at_end": True, **RANKED}, "saved every 10 steps and validated at the end only: that of step 10 has no validation/accuracy", "checkpointing.metric_name"),
    M("checkpoint metric", TINY, {"checkpointing.save_period": 30, **RANKED}, "saved every 30 steps and validated every 20 steps: that of step 30 has no", "checkpointing.metric_name"),
    M("checkpoint metric", TINY, {"grpo.max_num_steps": 50, "grpo.val_at_end": False, "checkpointing.save_period": 20, **RANKED}, "the checkpoint of the last step, 50, is saved without validation", "checkpointing.metric_name", "note"),
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
]  # fmt: skip
DISPATCH = [
    M("dispatcher", SYNC, {f"{MEGATRON}.moe_flex_dispatcher_backend": None}, "the flex dispatcher needs a backend"),
    M("dispatcher", TINY, {f"{MEGATRON}.moe_flex_dispatcher_backend": "deepep", "cluster.device": "cuda"}, "deepep has no effect with dispatcher alltoall, expected flex"),
    M("dispatcher", SYNC, {f"{MEGATRON}.moe_enable_deepep": True}, "expected false"),
    M("dispatcher", SYNC, {f"{MEGATRON}.moe_shared_expert_overlap": True}, "only the alltoall dispatcher overlaps"),
    M("dispatcher", DENSE, {f"{MEGATRON}.moe_token_dispatcher_type": "flex", f"{MEGATRON}.moe_flex_dispatcher_backend": "deepep"}, "flex on a dense model"),
    M("HybridEP keys", SYNC, {f"{MEGATRON}.moe_hybridep_num_sms": None}, "expected a number, such as 32"),
    M("HybridEP keys", DENSE, {f"{MEGATRON}.moe_hybridep_num_sms": 32}, "has no effect without policy.megatron_cfg.moe_flex_dispatcher_backend hybridep"),
    M("HybridEP keys", DENSE, {f"{ENV}.USE_MNNVL": "1"}, "has no effect without"),
    M("HybridEP environment", SYNC, {f"{ENV}.USE_MNNVL": "yes"}, '\'yes\', expected "0" or "1"'),
    M("HybridEP environment", SYNC, {f"{ENV}.{RANKS}": "-16"}, "'-16', expected a positive integer as text, expected \"16\""),
    M("HybridEP environment", SYNC, {f"{ENV}.NUM_OF_TOKENS_PER_CHUNK_COMBINE_API": "x"}, "'x', expected a positive integer"),
    M("HybridEP typed keys", SYNC, {f"{MEGATRON}.hybridep_num_ranks_per_nvlink_domain": 16, f"{ENV}.{RANKS}": "8"}, f"16, but {RANKS} is 8"),
    M("HybridEP typed keys", SYNC, {f"{MEGATRON}.hybridep_use_mnnvl": False}, "false, but USE_MNNVL is 1"),
    M("HybridEP topology", SYNC, {f"{ENV}.{RANKS}": "8"}, "8 ranks in an NVLink domain, expected EP 16"),
    M("HybridEP topology", SYNC, {f"{ENV}.{RANKS}": "3"}, "3 ranks in an NVLink domain do not divide EP 16"),
    M("HybridEP topology", BIG, {f"{ENV}.{RANKS}": "16"}, "16 ranks in an NVLink domain of 8 GPUs (h100)"),
    M("HybridEP topology", SYNC, {f"{ENV}.NVLINK_DOMAIN_SIZE": "8"}, "8, expected 72 on gb200"),
    M("HybridEP topology", H100, {f"{ENV}.USE_MNNVL": "1"}, '"1", expected "0": the NVLink domain of h100 ends at the node'),
    M("HybridEP prepadding", SYNC, {f"{MEGATRON}.moe_hybridep_prepad_packed_inputs": False}, "false, expected true with packed inputs, PP 1, 0 MTP layers"),
    M("HybridEP prepadding", BIG, {f"{MEGATRON}.moe_hybridep_prepad_packed_inputs": True}, "true, expected false with packed inputs, PP 8"),
    M("HybridEP prepadding", SYNC, {f"{MEGATRON}.mtp_num_layers": 1}, "expected false with packed inputs, PP 1, 1 MTP layers"),
    M("HybridEP shape", SYNC, {f"{ENV}.NUM_OF_TOKENS_PER_CHUNK_COMBINE_API": "100"}, "100 tokens, expected a multiple of 32"),
    M("GPU type", SYNC, {"cluster.gpu_type": "gh200", f"{ENV}.NVLINK_DOMAIN_SIZE": "4", f"{ENV}.USE_MNNVL": "0", f"{ENV}.{RANKS}": "4", "cluster.gpus_per_node": 8, "cluster.num_nodes": 2, "cluster.segment_size": None}, "8 GPUs on a node; gh200 has 4", "cluster.gpus_per_node"),
    M("GPU type", TINY, {"cluster.gpu_type": "h100"}, "h100 with device cpu, expected null"),
    M("segments", SYNC, {"cluster.segment_size": None}, "expected 4 nodes (EP 16 / 4 GPUs), or a multiple"),
    M("segments", SYNC, {"cluster.segment_size": 2}, "2 nodes x 4 GPUs are not a multiple of EP 16"),
    M("GPU type", TINY, {"cluster.gpu_memory_gib": 80.0}, "has no effect with device cpu"),
    M("segments", ASYNC, {"cluster.segment_size": 4}, "2 training nodes are not a multiple of segments of 4"),
    M("segments", SYNC, {"cluster.segment_size": 20}, "20 nodes x 4 GPUs are more than the 72 of an NVLink domain"),
]  # fmt: skip
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
]  # fmt: skip
NAMING = [
    M("run name", TINY, {"logger.log_dir": "runs/other"}, "'runs/other' does not name the recipe, expected a folder mutant, or null"),
    M("run name", TINY, {"checkpointing.checkpoint_dir": "ckpt"}, "'ckpt' does not name the recipe"),
    M("run name", TINY, {"logger.wandb.name": "x"}, "'x' is not the recipe's name, expected mutant, or null"),
    M("router format", SUPER, {f"{MEGATRON}.moe_router_dtype": "fp64"}, "fp64: HybridEP casts", severity="note"),
    M("unread variables", TINY, {f"{ENV}.NRL_REFIT_NUM_BUFFERS": "1"}, "nothing reads it here", severity="note"),
    M("CPU limits", TINY, {f"{MEGATRON}.context_parallel_size": 2, "cluster.gpus_per_node": 2, "policy.make_sequence_length_divisible_by": 4}, "2 with cluster.device cpu, expected 1: megatron-core's CPU attention"),
    M("CPU limits", TINY, {f"{MEGATRON}.defer_fp32_logits": True}, "true with cluster.device cpu, expected false: this version does not act on it yet"),
    M("CPU limits", EP2, {"cluster.segment_size": 1}, "1 with cluster.device cpu, expected null"),
    M("CPU limits", TINY, {f"{MEGATRON}.cuda_graph_impl": "local"}, "local with cluster.device cpu, expected none"),
]  # fmt: skip
OVERLAP = f"{MEGATRON}.overlap_moe_expert_parallel_comm"
GRAPHS = {f"{MEGATRON}.cuda_graph_impl": "transformer_engine"}
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
]  # fmt: skip
MUTATIONS = [
    *BENCHMARK,
    *ENGINE,
    *LAYOUT,
    *BATCHES,
    *OBJECTIVE,
    *CHECKPOINTS,
    *PLACEMENT,
    *DISPATCH,
    *TRAINER,
    *PRECISION,
    *REPLAYS,
    *NAMING,
]


@pytest.fixture(autouse=True)
def tiny_model(tmp_path_factory, monkeypatch):
    """A model folder with the tiny model's shape, where the recipes look for it."""
    root = tmp_path_factory.mktemp("cwd")
    folder = root / "models/tiny-moe-cpu"
    folder.mkdir(parents=True)
    shape = {
        "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 1024,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape))
    monkeypatch.chdir(root)


def written(folder: Path, mutation: Mutation) -> tuple[Path, int]:
    """The mutant's file, and the line of the blamed key."""
    nested: dict = {"defaults": str(mutation.base)}
    for key, value in mutation.keys.items():
        node = nested
        *parents, last = key.split(".")
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    path = folder / "mutant.yaml"
    path.write_text(yaml.safe_dump(nested, sort_keys=False))
    node = yaml.compose(path.read_text())
    line = 1
    for part in mutation.path.split("."):
        found = next(((k, v) for k, v in node.value if k.value == part), None) if hasattr(node, "value") else None
        if found is None:
            break
        line, node = found[0].start_mark.line + 1, found[1]
    return path, line


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.rule}: {m.path.rsplit('.', 1)[-1]}")
def test_broken_rule_is_the_only_problem_and_has_its_line(tmp_path, mutation):
    path, line = written(tmp_path, mutation)
    if mutation.severity == "error":
        found = problems_of(path)
    else:
        known = {(p.rule, p.message) for p in load_recipe(mutation.base).warnings}
        found = [p for p in load_recipe(path).warnings if (p.rule, p.message) not in known]
    assert [(p.rule, p.path) for p in found] == [(mutation.rule, mutation.path)], [str(p) for p in found]
    assert mutation.message in found[0].message
    if any(key.startswith(mutation.path) for key in mutation.keys):
        assert (Path(found[0].source.file).name, found[0].source.line) == ("mutant.yaml", line)


def test_every_rule_is_broken_by_a_mutation():
    assert {rule.name for rule in RULES} - {m.rule for m in MUTATIONS} == {"file name"}


FILE_NAMES = [
    ("grpo-x-8n4g", {}, "cluster.num_nodes", "4, but the file name says 8"),
    ("grpo-x-4n8g", {}, "cluster.gpus_per_node", "4, but the file name says 8"),
    ("grpo-x-4n4g-async-1off", {}, "grpo.async_grpo.enabled", "false, but the file name says async"),
    (
        "grpo-x-4n4g-mxfp8-rollout",
        {},
        "policy.generation.vllm_cfg.is_mx",
        "false, but the file name says mxfp8-rollout",
    ),
]


@pytest.mark.parametrize(("stem", "keys", "path", "message"), FILE_NAMES)
def test_file_name_that_says_something_else_is_the_only_problem(tmp_path, stem, keys, path, message):
    file = tmp_path / f"{stem}.yaml"
    file.write_text(yaml.safe_dump({"defaults": str(SYNC), **keys}))
    assert [(p.rule, p.path, p.message) for p in problems_of(file)] == [("file name", path, message)]


def test_file_name_with_another_age_is_a_problem(tmp_path):
    file = tmp_path / "grpo-x-4n4g-async-8off.yaml"
    file.write_text(yaml.safe_dump({"defaults": str(ASYNC)}))
    assert [str(p).split(": ", 1)[1] for p in problems_of(file)] == [
        "grpo.async_grpo.max_trajectory_age_steps: 1, but the file name says 8"
    ]


def test_the_only_environment_needs_no_name_and_ranks_checkpoints_by_its_own_accuracy():
    overrides = ["data.default.env_name=null", "checkpointing.enabled=true", "checkpointing.save_period=20"]
    recipe = load_recipe(TINY, [*overrides, "checkpointing.metric_name=validation/accuracy/arithmetic"]).recipe
    assert [environment_name(recipe, dataset) for dataset in (recipe.data.train, recipe.data.validation)] == [
        "arithmetic",
        "arithmetic",
    ]


def test_directory_from_the_command_line_is_the_users_own():
    assert load_recipe(TINY, ["logger.log_dir=/tmp/anything"]).recipe.logger.log_dir == "/tmp/anything"


def test_eleven_broken_rules_are_all_reported_at_once(tmp_path):
    file = tmp_path / "many.yaml"
    broken = {
        "policy": {
            "train_global_batch_size": 100,
            "make_sequence_length_divisible_by": 7,
            "generation": {"max_new_tokens": 65},
        },
        "loss_fn": {"sequence_level_importance_ratios": True, "truncated_importance_sampling_type": "tis"},
        "grpo": {
            "skip_reference_policy_logprobs_calculation": True,
            "advantage_clip_low": 1.0,
            "advantage_clip_high": 0.0,
        },
        "data": {"train": {"env_name": "nowhere", "path": "x"}},
        "checkpointing": {"metric_name": "val:accuracy"},
        "cluster": {"gpu_type": "h100"},
    }
    file.write_text(yaml.safe_dump({"defaults": str(TINY)} | broken))
    assert {p.rule for p in problems_of(file)} == {
        "train batch", "divisible length", "sequence length", "sequence ratios", "importance correction", "reference",
        "advantage clip", "environment", "dataset", "checkpoint metric", "GPU type",
    }  # fmt: skip
