"""Batches, lengths, validation, checkpoints and names."""

# ruff: noqa: E501 - one mutation a line reads best as a table.

from __future__ import annotations

from tests.unit.recipes.mutations.base import BIG, H100, M, OFF, SYNC, TINY, VLLM

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
