"""Batches, lengths, validation, checkpoints and names."""

# ruff: noqa: E501 - one mutation a line reads best as a table.

from __future__ import annotations

from tests.unit.recipes.mutations.base import (
    BIG,
    H100,
    JUPITER,
    MEGATRON,
    OFF,
    SYNC,
    TINY,
    UNPACKED,
    VLLM,
    M,
    V,
)

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
    M("train batch", SYNC, {"policy.train_global_batch_size": 1536}, "2048 samples are not a multiple of the train batch 1536"),
    M("data-parallel batch", JUPITER, {"policy.train_global_batch_size": 2040}, "2040 is not a multiple of DP 16"),
    M("data-parallel batch", JUPITER, {"policy.train_global_batch_size": 2040, "policy.train_micro_batch_size": 2}, "2040 is not a multiple of DP 16"),
    M("data-parallel batch", TINY, {"cluster.gpus_per_node": 3, **UNPACKED}, "128 is not a multiple of DP 3", "cluster.gpus_per_node"),
    M("micro-batch", JUPITER, {"policy.train_micro_batch_size": 3}, "128 samples on each rank are not a multiple of the micro-batch 3"),
    M("logprob batch", TINY, {"policy.logprob_batch_size": 3, **UNPACKED}, "128 samples of a step on each rank are not a multiple of 3"),
    M("packing keys", TINY, {"policy.sequence_packing.logprob_mb_tokens": 63, **UNPACKED}, "has no effect without sequence packing"),
    M("packing keys", TINY, {"policy.sequence_packing.train_mb_tokens": 64, **UNPACKED}, "has no effect without sequence packing"),
    M("packing keys", H100, {"policy.sequence_packing.fuse_loss": True, "policy.sequence_packing.enabled": False, f"{MEGATRON}.moe_hybridep_prepad_packed_inputs": False}, "has no effect without sequence packing"),
    M("packing keys", H100, {"policy.sequence_packing.microbatch_order": "largest_first", **UNPACKED, f"{MEGATRON}.moe_hybridep_prepad_packed_inputs": False}, "has no effect without sequence packing"),
    M("packing budget", TINY, {"policy.sequence_packing.train_mb_tokens": 63}, "63 tokens are fewer than max_total_sequence_length 64"),
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
    M("checkpoint metric", TINY, {"checkpointing.metric_name": "test/accuracy"}, "'test/accuracy': expected train/<metric> or validation/<metric>"),
    M("checkpoint metric", TINY, {"checkpointing.metric_name": "train/"}, "'train/': expected train/<metric>"),
    M("checkpoint metric", TINY, {"checkpointing.metric_name": "validation/zzzzqqqq"}, "validation/zzzzqqqq: no such metric"),
]  # fmt: skip

DYNAMIC = {"checkpointing.metric_name": "train/dynamic_sampling_groups"}
SAVED_ONCE = {"grpo.max_num_steps": 60, "checkpointing.save_period": 60, "grpo.val_at_end": True, **RANKED}
VALID = [
    V(TINY, {"policy.logprob_batch_size": 3}),
    V(JUPITER, {"policy.logprob_batch_size": 3}),
    V(JUPITER, {"grpo.num_prompts_per_step": 128}),
    V(TINY, {"policy.sequence_packing.logprob_mb_tokens": 64, "policy.sequence_packing.train_mb_tokens": 64}),
    V(TINY, {"grpo.max_val_samples": 16, "grpo.val_batch_size": 5, **OFF}),
    V(TINY, {"grpo.max_val_samples": 16, "grpo.val_batch_size": 8}),
    V(TINY, {"grpo.max_val_samples": 5, "grpo.val_batch_size": 16}),
    V(TINY, {"checkpointing.metric_name": "validation/accuracy", **OFF}),
    V(TINY, DYNAMIC),
    V(TINY, {"grpo.use_dynamic_sampling": True, "checkpointing.enabled": True, **DYNAMIC}),
    V(TINY, {"checkpointing.metric_name": "train/reward", "checkpointing.enabled": True}),
    V(TINY, {"checkpointing.save_period": 20, **RANKED, "checkpointing.metric_name": "validation/accuracy/arithmetic"}),
    V(TINY, {"grpo.val_period": 25, **SAVED_ONCE}),
    V(TINY, {"grpo.val_period": 0, **SAVED_ONCE, "checkpointing.save_period": 80}),
]  # fmt: skip
