"""HybridEP in the cluster recipes, recipe by recipe. Needs pytest, omegaconf, hydra-core and pydantic only.

Risk: a mixture of experts that trains over AlltoAll unnoticed, a topology that stalls or crawls, a dense recipe that
takes on keys which nothing reads.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from nemo_rl_moe.recipe.commands import flatten
from nemo_rl_moe.recipe.compose import FileCache, compose
from nemo_rl_moe.recipe.load import LoadedRecipe, load_recipe

PERFORMANCE = Path(__file__).resolve().parents[3] / "examples/configs/recipes/llm/performance"
MEGATRON = "policy.megatron_cfg"
RANKS, MNNVL = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", "USE_MNNVL"
DOMAIN, CHUNK = "NVLINK_DOMAIN_SIZE", "NUM_OF_TOKENS_PER_CHUNK_COMBINE_API"
TOPOLOGY = {RANKS, MNNVL, DOMAIN, CHUNK}

# Recipe: EP. The ranks of a GB200 recipe equal it.
GB200 = {
    "grpo-qwen3-30ba3b-4n4g": 16,
    "grpo-qwen3-30ba3b-4n4g-mxfp8-rollout": 16,
    "grpo-qwen3-30ba3b-4n4g-async-1off": 8,
    "grpo-qwen3-30ba3b-4n4g-async-1off-mxfp8-rollout": 8,
    "grpo-qwen3-235b-16n4g": 16,
    "grpo-qwen3-235b-16n4g-mxfp8-rollout": 16,
    "grpo-qwen3-235b-32n4g": 16,
    "grpo-qwen3-235b-32n4g-async-1off": 16,
    "grpo-qwen3-235b-32n4g-async-1off-mxfp8-rollout": 16,
    "grpo-deepseek-v3-32n4g": 16,
    "grpo-deepseek-v3-64n4g": 32,
    "grpo-deepseek-v3-64n4g-mxfp8-rollout": 32,
    "grpo-deepseek-v3-64n4g-async-1off": 16,
    "grpo-deepseek-v3-64n4g-async-1off-mxfp8-rollout": 16,
    "grpo-nemotron3-super-120BA12B-32n4g": 16,
    "grpo-nemotron3-super-120BA12B-32n4g-mxfp8-rollout": 16,
    "grpo-nemotron3-super-120BA12B-32n4g-async-1off": 16,
    "grpo-nemotron3-super-120BA12B-32n4g-async-1off-mxfp8-rollout": 16,
}
H100 = {
    "dapo-deepseek-v3-64n8g.v2": 32,
    "grpo-deepseek-v3-32n8g": 16,
    "grpo-deepseek-v3-64n8g": 32,
    "grpo-deepseek-v3-64n8g-async-1off": 16,
    "grpo-deepseek-v3-64n8g-fp8-async-1off": 16,
    "grpo-nemotron3-super-120BA12B-32n8g": 32,
    "grpo-nemotron3-super-120BA12B-32n8g-async-1off": 32,
    "grpo-qwen3-235b-16n8g": 16,
    "grpo-qwen3-235b-32n8g": 16,
    "grpo-qwen3-235b-32n8g-async-1off": 16,
    "grpo-qwen3-30ba3b-24n8g-async-8off": 8,
    "grpo-qwen3-30ba3b-4n8g": 8,
    "grpo-qwen3-30ba3b-4n8g-40K": 8,
    "grpo-qwen3-30ba3b-4n8g-async-1off": 8,
}
MOE = sorted(GB200 | H100)
DENSE = sorted({path.stem for path in PERFORMANCE.glob("*.yaml")} - set(MOE))
PREPADDED_GB200 = {name for name in GB200 if "qwen3-30ba3b" in name or "nemotron3" in name}
PREPADDED_H100 = {
    "grpo-nemotron3-super-120BA12B-32n8g",
    "grpo-nemotron3-super-120BA12B-32n8g-async-1off",
    "grpo-qwen3-30ba3b-24n8g-async-8off",
    "grpo-qwen3-30ba3b-4n8g",
    "grpo-qwen3-30ba3b-4n8g-40K",
}
# Variables that recipes carry for other reasons, and must keep.
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}
REFIT = {"NRL_REFIT_BUFFER_MEMORY_RATIO": "0.005", "NRL_REFIT_NUM_BUFFERS": "1"}
FILES = FileCache()


@cache
def load(name: str) -> LoadedRecipe:
    return load_recipe(PERFORMANCE / f"{name}.yaml", cache=FILES)


def env(name: str) -> dict[str, str]:
    return load(name).recipe.policy.megatron_cfg.env_vars or {}


def unrelated(name: str) -> dict[str, str]:
    if "qwen3-30ba3b" in name:
        return ALLOCATOR
    if "nemotron3" in name and "4g" in name:
        return ALLOCATOR | REFIT
    return {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"} if "-fp8-" in name else {}


def test_there_are_18_gb200_14_h100_and_11_dense_recipes():
    assert (len(GB200), len(H100), len(DENSE)) == (18, 14, 11)


@pytest.mark.parametrize("name", MOE)
def test_moe_recipe_reaches_its_experts_through_hybridep_with_32_sms(name):
    megatron = load(name).recipe.policy.megatron_cfg
    assert megatron.moe_token_dispatcher_type == "flex"
    assert megatron.moe_flex_dispatcher_backend == "hybridep"
    assert megatron.moe_hybridep_num_sms == 32
    assert megatron.moe_enable_deepep is False
    assert megatron.expert_model_parallel_size == (GB200 | H100)[name]


@pytest.mark.parametrize("name", sorted(GB200))
def test_gb200_topology_is_nvl72_with_ranks_equal_to_ep(name):
    expected = {RANKS: str(GB200[name]), DOMAIN: "72", MNNVL: "1", CHUNK: "128"}
    assert {key: value for key, value in env(name).items() if key in TOPOLOGY} == expected


@pytest.mark.parametrize("name", sorted(H100))
def test_h100_topology_is_8_ranks_in_the_node(name):
    expected = {RANKS: "8", DOMAIN: "8", MNNVL: "0", CHUNK: "128"}
    assert {key: value for key, value in env(name).items() if key in TOPOLOGY} == expected


@pytest.mark.parametrize("name", MOE)
def test_prepadding_is_on_exactly_for_packed_inputs_with_pp_1_and_no_mtp(name):
    policy = load(name).recipe.policy
    megatron = policy.megatron_cfg
    eligible = (
        policy.sequence_packing.enabled and megatron.pipeline_model_parallel_size == 1 and megatron.mtp_num_layers == 0
    )
    assert megatron.moe_hybridep_prepad_packed_inputs is eligible
    assert eligible is (name in PREPADDED_GB200 | PREPADDED_H100)


def test_eight_gb200_recipes_are_prepadded():
    assert len(PREPADDED_GB200) == 8


@pytest.mark.parametrize("name", MOE)
def test_unrelated_variables_are_preserved_and_none_is_added(name):
    assert {key: value for key, value in env(name).items() if key not in TOPOLOGY} == unrelated(name)


@pytest.mark.parametrize("name", DENSE)
def test_dense_recipe_stays_on_alltoall_without_any_hybridep_key(name):
    root = compose(PERFORMANCE / f"{name}.yaml", FILES).root.plain()
    megatron = root["policy"]["megatron_cfg"]
    assert load(name).recipe.policy.megatron_cfg.moe_token_dispatcher_type == "alltoall"
    written = {key for key in megatron if "hybridep" in key or "flex" in key or "dispatcher" in key}
    assert written == set()
    assert not TOPOLOGY & set(megatron.get("env_vars") or {})


@pytest.mark.parametrize("name", sorted(GB200))
def test_expert_group_stays_inside_one_segment_and_one_rack(name):
    cluster = load(name).recipe.cluster
    gpus = cluster.segment_size * cluster.gpus_per_node
    assert gpus % GB200[name] == 0 and gpus <= 72
    assert cluster.num_nodes % cluster.segment_size == 0


HYBRIDEP_KEYS = {
    f"{MEGATRON}.moe_token_dispatcher_type",
    f"{MEGATRON}.moe_flex_dispatcher_backend",
    f"{MEGATRON}.moe_hybridep_num_sms",
    f"{MEGATRON}.moe_hybridep_prepad_packed_inputs",
    *(f"{MEGATRON}.env_vars.{name}" for name in TOPOLOGY),
}
TO_ALLTOALL = (
    f"{MEGATRON}.moe_token_dispatcher_type=alltoall",
    f"~{MEGATRON}.moe_flex_dispatcher_backend",
    f"~{MEGATRON}.moe_hybridep_num_sms",
    f"~{MEGATRON}.moe_hybridep_prepad_packed_inputs",
    *(f"~{MEGATRON}.env_vars.{name}" for name in sorted(TOPOLOGY)),
)


@pytest.mark.parametrize("name", MOE)
def test_alltoall_twin_is_valid_and_differs_in_hybridep_keys_only(name):
    mine = flatten(load(name).resolved)
    twin = flatten(load_recipe(PERFORMANCE / f"{name}.yaml", TO_ALLTOALL, cache=FILES).resolved)
    changed = {key for key in {*mine, *twin} if mine.get(key) != twin.get(key)}
    assert changed <= HYBRIDEP_KEYS
    assert changed >= HYBRIDEP_KEYS - {f"{MEGATRON}.moe_hybridep_prepad_packed_inputs"}


@pytest.mark.parametrize(("family", "count"), [("gb200_moe", 18), ("h100_moe", 14)])
def test_one_edit_of_a_hardware_file_reaches_its_family(family, count):
    reached = [name for name in MOE if any(path.stem == family for path in load(name).files)]
    assert len(reached) == count
