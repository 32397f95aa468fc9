"""The loss, data and environments, names, and what a device does not act on."""

# ruff: noqa: E501 - one mutation a line reads best as a table.

from __future__ import annotations

from tests.unit.recipes.mutations.base import (
    ASYNC,
    ENV,
    EP2,
    MEGATRON,
    MXFP8,
    SUPER,
    SYNC,
    TINY,
    VLLM,
    M,
    V,
)

CORRECTED = {"loss_fn.use_importance_sampling_correction": True}
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
    M("importance correction", TINY, {"loss_fn.truncated_importance_sampling_ratio": 2.0}, "has no effect while use_importance_sampling_correction is false"),
    M("importance correction", TINY, {"loss_fn.truncated_importance_sampling_ratio_min": 0.5}, "has no effect while use_importance_sampling_correction is false"),
    M("importance correction", TINY, {"loss_fn.truncated_importance_sampling_ratio_min": 0.5, **CORRECTED}, "has no effect without a type"),
    M("importance correction", TINY, {"loss_fn.truncated_importance_sampling_type": "seq-mask-tis", "loss_fn.truncated_importance_sampling_ratio": 2.0, **CORRECTED}, "seq-mask-tis needs truncated_importance_sampling_ratio_min"),
    M("importance correction", TINY, {"loss_fn.truncated_importance_sampling_ratio_min": 0.5, "loss_fn.truncated_importance_sampling_ratio": 2.0, "loss_fn.truncated_importance_sampling_type": "tis", **CORRECTED}, "has no effect with type tis"),
    M("reward scaling", TINY, {"grpo.reward_scaling.source_min": 1.0, "grpo.reward_scaling.enabled": True}, "source_min 1 is not below source_max 1"),
    M("overlong penalty", TINY, {"grpo.reward_shaping.overlong_buffer_length": 9, "grpo.reward_shaping.max_response_length": 8, "grpo.reward_shaping.enabled": True}, "9 tokens, but responses end at 8"),
    M("environment", TINY, {"data.validation.env_name": None, "data.default.env_name": None, "data.train.env_name": "arithmetic", "env.more.verifier": "math_verify", "checkpointing": {"enabled": True, "save_period": 20, "metric_name": "validation/accuracy/x"}}, "no environment, expected one of ['arithmetic', 'more']"),
    M("dataset", TINY, {"data.validation.path": "x.jsonl"}, "has no effect with dataset_name reasoning_gym"),
]  # fmt: skip

ENGINE = [
    M(
        "vLLM arguments",
        TINY,
        {"policy.generation.vllm_kwargs": {"logprobs_mode": "raw_logprobs"}},
        "the run sets vLLM's logprobs_mode itself",
        "policy.generation.vllm_kwargs.logprobs_mode",
    ),
]

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
    M("file name", SYNC, {}, "4, but the file name says 8", "cluster.num_nodes", stem="grpo-x-8n4g"),
    M("file name", SYNC, {}, "4, but the file name says 8", "cluster.gpus_per_node", stem="grpo-x-4n8g"),
    M("file name", SYNC, {}, "false, but the file name says async", "grpo.async_grpo.enabled", stem="grpo-x-4n4g-async-1off"),
    M("file name", ASYNC, {}, "true, but the file name says sync", "grpo.async_grpo.enabled", stem="grpo-x-4n4g"),
    M("file name", TINY, {}, "false, but the file name says async", "grpo.async_grpo.enabled", stem="tiny-async-1off"),
    M("file name", ASYNC, {}, "1, but the file name says 8", "grpo.async_grpo.max_trajectory_age_steps", stem="grpo-x-4n4g-async-8off"),
    M("file name", SYNC, {}, "false, but the file name says mxfp8-rollout", f"{VLLM}.is_mx", stem="grpo-x-4n4g-mxfp8-rollout"),
    M("file name", MXFP8, {}, "true, but the file name says no mxfp8-rollout", f"{VLLM}.is_mx", stem="grpo-x-4n4g"),
    M("unread variables", TINY, {f"{ENV}.NRL_REFIT_BUFFER_MEMORY_RATIO": "0.005"}, "nothing reads it here", severity="note"),
    M("unread variables", TINY, {f"{VLLM}.env_vars.NRL_REFIT_NUM_BUFFERS": "1"}, "nothing reads it here", severity="note"),
]  # fmt: skip

SOFT = "grpo.reward_shaping"
VALID = [
    V(TINY, {"loss_fn.sequence_level_importance_ratios": True, "loss_fn.token_level_loss": False}),
    V(TINY, {"loss_fn.truncated_importance_sampling_type": "tis", "loss_fn.truncated_importance_sampling_ratio": 2.0, **CORRECTED}),
    V(TINY, {"loss_fn.truncated_importance_sampling_type": "icepop", "loss_fn.truncated_importance_sampling_ratio": 2.0, "loss_fn.truncated_importance_sampling_ratio_min": 2.0, **CORRECTED}),
    V(TINY, CORRECTED),
    V(TINY, {"grpo.advantage_clip_low": 1.0, "grpo.advantage_clip_high": 1.0}),
    V(TINY, {"grpo.advantage_clip_low": 1.0}),
    V(TINY, {"grpo.advantage_clip_high": 1.0}),
    V(TINY, {"grpo.reward_scaling.source_min": 2.0}),
    V(TINY, {"grpo.reward_scaling.enabled": True}),
    V(TINY, {f"{SOFT}.enabled": True, f"{SOFT}.overlong_buffer_length": 16}),
    V(TINY, {"logger.log_dir": "runs/mutant", "checkpointing.checkpoint_dir": "x/mutant/y", "logger.wandb.name": "mutant"}),
    V(TINY, {"logger.log_dir": None, "checkpointing.checkpoint_dir": None, "logger.wandb.name": None}),
    V(TINY, {}, overrides=("logger.log_dir=/tmp/anything", "++logger.wandb.name=mine")),
]  # fmt: skip
