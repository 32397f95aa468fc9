"""The cluster recipes against a table of what each one is. Risk: an edit that reaches a recipe it was not meant for.

The table states batch sizes, parallelism, precision, allocator and loss settings by themselves, without inheritance.
Dispatcher and topology are in test_hybridep_recipes.py.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from nemo_rl_moe.recipe.compose import FileCache
from nemo_rl_moe.recipe.hybrid_ep import TOPOLOGY_ENV
from nemo_rl_moe.recipe.load import load_recipe
from nemo_rl_moe.recipe.plan import plan
from nemo_rl_moe.recipe.schema import Recipe
from tests.unit.recipes.writing import CONFIGS, PERFORMANCE

TABLE = {
    row.pop("recipe"): row
    for row in csv.DictReader((Path(__file__).parent / "performance_recipes.csv").read_text().splitlines())
}
ALL = sorted(CONFIGS.rglob("*.yaml"))
CACHE = FileCache()


def facts(recipe: Recipe) -> dict[str, str]:
    """A recipe in the table's words."""
    policy, grpo, loss, layout = recipe.policy, recipe.grpo, recipe.loss_fn, plan(recipe)
    megatron, vllm, packing = policy.megatron_cfg, policy.generation.vllm_cfg, policy.sequence_packing
    first, last = megatron.num_layers_in_first_pipeline_stage, megatron.num_layers_in_last_pipeline_stage
    split = "colocated" if layout.colocated else f"{layout.policy_world}+{layout.generation_world}"
    env = {k: v for k, v in (megatron.env_vars or {}).items() if k not in TOPOLOGY_ENV}
    ahead = grpo.async_grpo
    return {
        "model": policy.model_name,
        "cluster": f"{recipe.cluster.num_nodes}x{recipe.cluster.gpus_per_node} {recipe.cluster.gpu_type}",
        "segment": str(recipe.cluster.segment_size),
        "placement": split,
        "train": f"TP{megatron.tensor_model_parallel_size} PP{megatron.pipeline_model_parallel_size} "
        f"CP{megatron.context_parallel_size} EP{megatron.expert_model_parallel_size} DP{layout.policy_dp} "
        f"SP{int(megatron.sequence_parallel)}",
        "first/last layers": f"{first}/{last}",
        "vllm": f"TP{vllm.tensor_parallel_size} util {vllm.gpu_memory_utilization} {vllm.precision} mx {vllm.is_mx} "
        f"async {vllm.async_engine} moe {policy.generation.vllm_kwargs.get('moe_backend')}",
        "length": f"{policy.max_total_sequence_length} div {policy.make_sequence_length_divisible_by}",
        "batch": f"{grpo.num_prompts_per_step}x{grpo.num_generations_per_prompt} gbs {policy.train_global_batch_size} "
        f"mbs {policy.train_micro_batch_size} logprob {policy.logprob_batch_size}",
        "packing": f"{packing.enabled} fuse {packing.fuse_loss} {packing.microbatch_order}",
        "async": f"{ahead.enabled} age {ahead.max_trajectory_age_steps} in flight {ahead.in_flight_weight_updates}",
        "loss": f"IS {loss.use_importance_sampling_correction} on-policy {loss.force_on_policy_ratio}",
        "recompute": str(megatron.activation_checkpointing),
        "router": f"{megatron.moe_router_dtype} {megatron.moe_router_bias_update_rate}",
        "policy env": " ".join(f"{k}={v}" for k, v in sorted(env.items())),
        "validation": f"{grpo.val_period}/{grpo.max_val_samples}/{grpo.val_batch_size}",
        "checkpoints": str(recipe.checkpointing.enabled),
        "training fp8": megatron.fp8_cfg.fp8_recipe if megatron.fp8_cfg.enabled else "no",
    }


@pytest.mark.parametrize("name", sorted(TABLE))
def test_recipe_is_what_the_table_says(name):
    assert facts(load_recipe(PERFORMANCE / f"{name}.yaml", cache=CACHE).recipe) == TABLE[name]


def test_there_are_43_recipes_and_each_is_in_the_table():
    assert len(TABLE) == 43
    assert {path.stem for path in PERFORMANCE.glob("*")} - {"README"} == set(TABLE)


@pytest.mark.parametrize("path", ALL, ids=lambda p: str(p.relative_to(CONFIGS)))
def test_every_shipped_recipe_resolves_validates_and_plans(path):
    loaded = load_recipe(path, cache=CACHE)
    layout = plan(loaded.recipe)
    assert [rank.rank for rank in layout.policy_ranks] == list(range(layout.policy_world))
    assert sum(len(engine.devices) for engine in layout.engines) == layout.generation_world
    used = {*layout.policy_bundles, *(d for engine in layout.engines for d in engine.devices)}
    assert used == set(range(layout.total_devices)), "devices that nobody uses"


def test_the_gpu_base_leaves_to_the_hardware_files_what_they_set():
    """Two parents share this base, and the later one wins with all it has: a key in both would undo the first's."""
    from nemo_rl_moe.recipe.compose import compose
    from nemo_rl_moe.recipe.source import leaves

    base = {path for path, _ in leaves(compose(CONFIGS / "grpo_math_gpu.yaml").own)}
    for hardware in sorted((CONFIGS / "hardware").glob("*.yaml")):
        own = {path for path, _ in leaves(compose(hardware).own)}
        assert not own & base, hardware.name
    models = {}
    for model in sorted((CONFIGS / "models").glob("*.yaml")):
        models |= dict.fromkeys(path for path, _ in leaves(compose(model).own))
    assert not any(path[0] == "cluster" or path[-1] in TOPOLOGY_ENV for path in models)


MXFP8 = [name for name in sorted(TABLE) if name.endswith("-mxfp8-rollout")]
PRECISION_KEYS = {
    "policy.generation.vllm_cfg.precision",
    "policy.generation.vllm_cfg.is_mx",
    "policy.generation.vllm_cfg.quantization_ignore_patterns",
    "policy.generation.vllm_kwargs.moe_backend",
}
# What else differs, and why, is in docs/recipes.md.
ALSO = {
    "grpo-qwen3-30ba3b-4n4g-mxfp8-rollout": {"loss_fn.use_importance_sampling_correction"},
    "grpo-qwen3-32b-4n4g-mxfp8-rollout": {"loss_fn.use_importance_sampling_correction", "cluster.segment_size"},
    "grpo-qwen3-32b-8n4g-async-1off-mxfp8-rollout": {"cluster.segment_size"},
    "grpo-qwen3-235b-16n4g-mxfp8-rollout": {"policy.generation.vllm_cfg.tensor_parallel_size"},
    "grpo-qwen3-235b-32n4g-async-1off-mxfp8-rollout": {"policy.generation.vllm_cfg.tensor_parallel_size"},
}


@pytest.mark.parametrize("name", MXFP8)
def test_mxfp8_recipe_differs_from_its_bfloat16_twin_in_rollout_precision_only(name):
    from nemo_rl_moe.recipe.commands import flatten

    mine, twin = (
        flatten(load_recipe(PERFORMANCE / f"{stem}.yaml", cache=CACHE).resolved)
        for stem in (name, name.removesuffix("-mxfp8-rollout"))
    )
    changed = {key for key in {*mine, *twin} if mine.get(key) != twin.get(key)}
    dense = {"policy.generation.vllm_kwargs.moe_backend"} if "qwen3-32b" in name else set()
    assert changed <= PRECISION_KEYS | ALSO.get(name, set())
    assert changed >= PRECISION_KEYS - dense | ALSO.get(name, set()) - {"policy.generation.vllm_kwargs.moe_backend"}
    assert mine["policy.generation.vllm_cfg.precision"] == "fp8"
