"""The environment variables of each kind of worker, from the recipe alone."""

from __future__ import annotations

from pathlib import Path

from nemo_rl_moe.recipe.schema import Recipe

# Reasons: torch.compile costs seconds per shape on a CPU and buys nothing at these sizes; a one-process engine starts
# in a tenth of the time; 'nobind' because vLLM's own core binding assumes that it has the machine to itself.
_CPU = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "CUDA_VISIBLE_DEVICES": "",
}
_ALWAYS = {"TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def worker_environment(recipe: Recipe, kind: str) -> dict[str, str]:
    """Variables that a worker of the kind (`policy` or `generation`) starts with; the recipe's `env_vars` win."""
    env = dict(_ALWAYS)
    if recipe.cluster.device == "cpu":
        env |= _CPU
        env["OMP_NUM_THREADS"] = str(recipe.cluster.cpus_per_device)
    if Path(recipe.policy.model_name).is_dir():
        # A local model needs no hub; a look-up there would only wait for a network that may not exist.
        env["HF_HUB_OFFLINE"] = "1"
    own = recipe.policy.megatron_cfg.env_vars if kind == "policy" else recipe.policy.generation.vllm_cfg.env_vars
    return env | (own or {})
