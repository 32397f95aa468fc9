"""The first lines of a run: what runs, on what, laid out how."""

from __future__ import annotations

import json
from pathlib import Path

from nemo_rl_moe.recipe.load import LoadedRecipe
from nemo_rl_moe.recipe.plan import Plan, plan
from nemo_rl_moe.recipe.schema import Recipe


def header_lines(loaded: LoadedRecipe, run_dir: Path) -> list[tuple[str, str]]:
    """Label and text of each line."""
    recipe, layout = loaded.recipe, plan(loaded.recipe)
    lines = [
        ("recipe", str(loaded.path)),
        ("model", _model(recipe)),
        ("devices", _devices(recipe, layout)),
        ("trainer", _trainer(recipe, layout)),
        ("generator", _generator(recipe, layout)),
        ("batch", _batch(layout)),
        ("run dir", str(run_dir)),
    ]
    return lines if not loaded.overrides else [*lines[:1], ("overrides", " ".join(loaded.overrides)), *lines[1:]]


def _model(recipe: Recipe) -> str:
    name, precision = recipe.policy.model_name, recipe.policy.precision
    try:
        config = json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"{name} ({precision})"
    parts = [str(config.get("model_type", "?")), f"{config.get('num_hidden_layers', '?')} layers"]
    experts = config.get("num_experts", config.get("num_local_experts"))
    if experts:
        parts.append(f"{experts} experts, top {config.get('num_experts_per_tok', '?')}")
    return f"{name} ({', '.join([*parts, precision])})"


def _devices(recipe: Recipe, layout: Plan) -> str:
    if layout.device == "cpu":
        cores = recipe.cluster.cpus_per_device
        kind = f"CPU device{_s(layout.total_devices)} of {cores} core{_s(cores)}"
    else:
        kind = f"GPU{_s(layout.total_devices)}"
    nodes = f" on {layout.num_nodes} nodes" if layout.num_nodes > 1 else ""
    sharing = (
        f"trainer and generator take turns on {'it' if layout.total_devices == 1 else 'them'}"
        if layout.colocated
        else f"{layout.policy_world} train, {layout.generation_world} generate"
    )
    return f"{layout.total_devices} {kind}{nodes}; {sharing}"


def _trainer(recipe: Recipe, layout: Plan) -> str:
    cfg = recipe.policy.megatron_cfg
    sizes = {
        "TP": cfg.tensor_model_parallel_size,
        "PP": cfg.pipeline_model_parallel_size,
        "CP": cfg.context_parallel_size,
        "EP": cfg.expert_model_parallel_size,
        "ETP": cfg.expert_tensor_parallel_size,
        "DP": layout.policy_dp,
    }
    split = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    ranks = f"{layout.policy_world} rank{_s(layout.policy_world)}"
    return f"megatron-core, {ranks}" + (f" ({split})" if split else "")


def _generator(recipe: Recipe, layout: Plan) -> str:
    engines = len(layout.engines)
    size = f" on {layout.engine_size} devices each" if layout.engine_size > 1 else ""
    return f"vLLM, {engines} engine{_s(engines)}{size}, up to {recipe.policy.generation.max_new_tokens} new tokens"


def _batch(layout: Plan) -> str:
    batch = layout.batch
    updates = batch.optimizer_steps_per_step
    return (
        f"{batch.prompts_per_step} prompts x {batch.generations_per_prompt} responses a step, "
        f"{updates} update{_s(updates)} of {batch.train_global_batch_size} samples"
    )


def _s(count: int) -> str:
    return "" if count == 1 else "s"
