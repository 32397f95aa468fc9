"""The recipe of our side of the benchmarks: the workload's step as TRL's trainer does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.bench.workloads import Workload


def plain_recipe(
    folder: Path, workload: Workload, *, threads: int, steps: int = 1, log_dir: Path | None = None
) -> dict[str, Any]:
    """A complete recipe as plain values.

    One optimizer step for each batch of samples, so the ratio is 1 and no earlier log-probabilities are needed, as in
    TRL; KL weight 0.04, k3; learning rate 1e-6; group-normalised rewards.

    Args:
        folder: made by `workloads.make`.
        threads: CPU threads of the trainer and of the generator, which take turns.
    """
    longest = workload.prompt_tokens + workload.max_new_tokens
    return {
        "policy": {
            "model_name": str((folder / "model").resolve()),
            "precision": "float32",
            "train_global_batch_size": workload.samples,
            "train_micro_batch_size": workload.samples,
            "logprob_batch_size": workload.samples,
            "max_total_sequence_length": longest,
            "sequence_packing": {
                "enabled": True,
                "share_prompts": True,
                "train_mb_tokens": max(longest, 8192),
                "logprob_mb_tokens": max(longest, 8192),
            },
            "megatron_cfg": {"optimizer": {"lr": 1e-6, "min_lr": 1e-6, "weight_decay": 0.0}},
            "generation": {
                "max_new_tokens": workload.max_new_tokens,
                "temperature": 1.0,
                "vllm_cfg": {"kv_cache_memory_bytes": 256 << 20, "max_model_len": longest},
            },
        },
        "loss_fn": {
            "reference_policy_kl_penalty": 0.04,
            "force_on_policy_ratio": True,
        },
        "grpo": {
            "num_prompts_per_step": workload.num_prompts,
            "num_generations_per_prompt": workload.group_size,
            "max_num_steps": steps,
            "max_num_epochs": 1000,
            "use_leave_one_out_baseline": False,
            "val_period": 0,
            "seed": 1,
        },
        "data": {
            "max_input_seq_length": workload.prompt_tokens,
            "train": {"dataset_name": "jsonl", "path": str((folder / "prompts.jsonl").resolve()), "env_name": "parity"},
        },
        "env": {"parity": {"verifier": "tools.bench.verifier:text_parity"}},
        "logger": {"log_dir": str(log_dir) if log_dir else None, "num_rollout_samples": 0},
        "cluster": {"device": "cpu", "num_nodes": 1, "gpus_per_node": 1, "cpus_per_device": threads},
    }


def async_one_off(recipe: dict[str, Any]) -> dict[str, Any]:
    """The same step split over two devices of as many threads each: the generator runs one step ahead.

    The importance correction is on, as a recipe of this placement needs it; the ratio is then not forced to 1.
    """
    recipe["cluster"]["gpus_per_node"] = 2
    recipe["policy"]["generation"]["colocated"] = {"enabled": False, "resources": {"gpus_per_node": 1}}
    recipe["policy"]["generation"]["vllm_cfg"]["async_engine"] = True
    recipe["grpo"]["async_grpo"] = {"enabled": True, "max_trajectory_age_steps": 1}
    recipe["loss_fn"] |= {"use_importance_sampling_correction": True}
    return recipe
