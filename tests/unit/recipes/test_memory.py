"""Risk: a plan that promises memory which a run does not have, or frightens off one that fits.

Expected values are worked out here by hand or come from published counts and calculations, not from the code.
"""

from __future__ import annotations

import json

import pytest

from nemo_rl_moe.recipe.memory.activations import kept_activations, saved_activations
from nemo_rl_moe.recipe.memory.engine import cache_bytes_per_token, engine_weights
from nemo_rl_moe.recipe.memory.estimate import UnknownModel, estimate_memory
from nemo_rl_moe.recipe.memory.gpus import GIB, MIB, TOTAL_MIB, gpu_bytes
from nemo_rl_moe.recipe.memory.parameters import model_parameters
from nemo_rl_moe.recipe.memory.stages import chunks_in_flight, stage_chunks
from nemo_rl_moe.recipe.memory.trainer import RankParameters, rank_parameters, state_bytes
from nemo_rl_moe.recipe.published_models import PUBLISHED, model_config
from nemo_rl_moe.recipe.schema.policy import MegatronConfig
from tests.unit.recipes.shared import loaded

QWEN_235B = "Qwen/Qwen3-235B-A22B"
# Tensor elements of the checkpoints on the hub; DeepSeek-V3 without its multi-token-prediction layer.
TOTALS = {
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    QWEN_235B: 235_093_634_560,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "deepseek-ai/DeepSeek-V3": 671_026_419_200,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
}


@pytest.mark.parametrize("name", sorted(TOTALS))
def test_parameters_are_those_of_the_published_checkpoint(name):
    parameters = model_parameters(PUBLISHED[name])
    assert parameters.exact
    assert parameters.total == TOTALS[name]


def test_nemotron_3_super_is_an_estimate_of_120_billion():
    parameters = model_parameters(PUBLISHED["nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16"])
    assert not parameters.exact
    assert round(parameters.total / 1e9, 1) == 120.7
    assert [layer.ffn for layer in parameters.layers].count("moe") == 40
    assert [layer.kind for layer in parameters.layers].count("attention") == 8


def test_ranks_of_all_stages_and_shards_add_up_to_the_model():
    """TP 2 PP 4 EP 16: copied parameters are counted once, the others by their shards; 151,936 rows need no padding."""
    recipe = loaded("grpo-qwen3-235b-16n4g").recipe
    parameters = model_parameters(PUBLISHED[QWEN_235B])
    ranks = rank_parameters(parameters, recipe)
    copied = sum(layer.copied + layer.router for layer in parameters.layers) + parameters.hidden_size
    assert sum(rank.experts for rank in ranks) * 16 == sum(layer.experts for layer in parameters.layers)
    assert sum(rank.dense for rank in ranks) * 2 - copied == parameters.total - sum(r.experts for r in ranks) * 16
    assert all(rank.frozen > 0 for rank in ranks)


def test_state_of_a_rank_is_2_weights_2_gradients_12_optimizer_bytes_sharded():
    recipe = loaded("grpo-qwen3-30ba3b-4n4g").recipe
    state = state_bytes(RankParameters(dense=1600, experts=800, frozen=0), recipe, dp_cp=16, edp=2)
    assert state == {"weights": 4800, "gradients": 4800, "optimizer": 12 * (100 + 400)}


def test_dense_state_is_sharded_over_dp_and_cp_and_that_of_experts_over_expert_dp():
    """235B on 64 GPUs, TP 2 PP 4 CP 2 EP 16: DP 4 x CP 2 = 8 shards of dense parameters, one of each expert's."""
    recipe = loaded("grpo-qwen3-235b-16n4g").recipe
    rank = rank_parameters(model_parameters(PUBLISHED[QWEN_235B]), recipe)[1]
    phase = next(p for p in estimate_memory(recipe).phases if p.stage == 1)
    assert phase.terms["optimizer"] == 12 * (-(-(rank.dense - rank.frozen) // 8) + rank.experts)


def test_frozen_parameters_have_neither_gradients_nor_optimizer_state():
    recipe = loaded("grpo-qwen3-30ba3b-4n4g").recipe
    state = state_bytes(RankParameters(dense=1600, experts=0, frozen=160), recipe, dp_cp=10, edp=1)
    assert state == {"weights": 3200, "gradients": 2880, "optimizer": 12 * 144}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["policy.megatron_cfg.optimizer.use_distributed_optimizer=false"], (200, 200, 1200)),
        (["policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32=true"], (200, 400, 300)),
        (["policy.precision=float32"], (400, 400, 200)),
    ],
)
def test_state_follows_optimizer_and_number_format(changes, expected):
    fixed = [
        "policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather=false",
        "policy.generation.vllm_cfg.precision=bfloat16",
    ]
    recipe = loaded("grpo-llama3.1-8b-instruct-2n4g", *fixed, *changes).recipe
    state = state_bytes(RankParameters(dense=100, experts=0, frozen=0), recipe, dp_cp=4, edp=1)
    assert tuple(state.values()) == expected


def test_a_layer_of_235b_at_tp2_and_4096_tokens_saves_441_mib_and_361_with_selective_recompute():
    """The figures of the weak-scaling report's memory table: 128 + 96 + 48 experts, 103 attention, 64 stream."""
    base = ["policy.max_total_sequence_length=4096", "policy.megatron_cfg.context_parallel_size=1"]
    kept = ["policy.megatron_cfg.activation_checkpointing=false"]
    selective = [
        "policy.megatron_cfg.recompute_granularity=selective",
        "policy.megatron_cfg.recompute_modules=[moe_act,layernorm]",
    ]
    config = PUBLISHED[QWEN_235B]
    layer = model_parameters(config).layers[0]
    whole, part = (loaded("grpo-qwen3-235b-16n4g", *base, *more).recipe for more in (kept, selective))
    saved = saved_activations(config, layer, whole, 4096)
    sizes = saved.expert_input, saved.expert_hidden, saved.expert_activation, saved.residual + saved.norms
    assert tuple(size / MIB for size in sizes) == (128, 96, 48, 64)
    assert kept_activations(saved, whole) / MIB == pytest.approx(441, abs=3)
    assert kept_activations(saved, part) / MIB == pytest.approx(361, abs=3)


def test_full_recompute_keeps_one_layer_input():
    recipe = loaded("grpo-qwen3-235b-16n4g").recipe
    config = PUBLISHED[QWEN_235B]
    saved = saved_activations(config, model_parameters(config).layers[0], recipe, 8192)
    # 8192 tokens over CP 2 and TP 2 with sequence parallelism, 4096 wide, 2 bytes.
    assert kept_activations(saved, recipe) == 8192 / 4 * 4096 * 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((0, 8, 3, 128), 31),  # interleaved, as the weak-scaling report counts it: 31 chunks of 4 layers
        ((0, 8, 4, 128), 39),
        ((0, 8, 1, 128), 8),
        ((7, 8, 1, 128), 1),
        ((0, 8, 1, 3), 3),
    ],
)
def test_chunks_in_flight(arguments, expected):
    assert chunks_in_flight(*arguments) == expected


def test_first_and_last_stage_hold_the_layers_that_the_recipe_says():
    megatron = loaded("grpo-deepseek-v3-32n4g").recipe.policy.megatron_cfg
    sizes = [sum(map(len, chunks)) for chunks in stage_chunks(61, megatron)]
    assert sizes == [7, 8, 8, 8, 8, 8, 8, 6]


def test_virtual_stages_interleave():
    megatron = MegatronConfig(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=2)
    assert stage_chunks(8, megatron) == [[range(0, 2), range(4, 6)], [range(2, 4), range(6, 8)]]


def test_every_gpu_type_has_a_size_and_a_recipe_can_give_its_own():
    recipe = loaded("grpo-qwen3-30ba3b-4n4g").recipe
    assert set(TOTAL_MIB) == {"h100", "h200", "b200", "gb200", "gb300", "gh200"}
    assert 180 * GIB < gpu_bytes(recipe) < 186 * GIB
    assert gpu_bytes(loaded("grpo-qwen3-30ba3b-4n4g", "cluster.gpu_memory_gib=141").recipe) == 141 * GIB


def test_key_value_cache_of_a_token():
    """Qwen3-235B under TP 8: 94 layers x key and value x one of 4 heads on each device x 128 x 2 bytes."""
    recipe = loaded("grpo-qwen3-235b-16n4g").recipe
    config = PUBLISHED[QWEN_235B]
    assert cache_bytes_per_token(config, model_parameters(config), recipe) == 94 * 2 * 1 * 128 * 2
    deepseek = loaded("grpo-deepseek-v3-32n4g").recipe
    config = PUBLISHED["deepseek-ai/DeepSeek-V3"]
    assert cache_bytes_per_token(config, model_parameters(config), deepseek) == 61 * (512 + 64) * 2


def test_mxfp8_engine_keeps_attention_and_vocabulary_in_bfloat16():
    """30B on one GPU: experts at 1 + 1/32 bytes, the rest at 2."""
    parameters = model_parameters(PUBLISHED["Qwen/Qwen3-30B-A3B"])
    experts = sum(layer.experts for layer in parameters.layers)
    weights = engine_weights(parameters, loaded("grpo-qwen3-30ba3b-4n4g-mxfp8-rollout").recipe)
    assert weights == pytest.approx(experts * 33 / 32 + (parameters.total - experts) * 2, rel=1e-4)


def test_an_engine_whose_weights_leave_no_room_for_one_sequence_is_named():
    memory = estimate_memory(
        loaded("grpo-qwen3-30ba3b-4n4g", "policy.generation.vllm_cfg.gpu_memory_utilization=0.3").recipe
    )
    assert memory.cache_tokens == 0
    assert any("fewer than one sequence of 4096" in problem for problem in memory.problems)


@pytest.mark.parametrize(("gib", "verdict"), [(183, "fits"), (65, "tight"), (60, "too large")])
def test_verdict_follows_the_overhead_band(gib, verdict):
    """58.0 GiB in training, 61.0 to 66.0 with overhead."""
    memory = estimate_memory(loaded("grpo-qwen3-30ba3b-4n4g", f"cluster.gpu_memory_gib={gib}").recipe)
    training = next(phase for phase in memory.phases if phase.name == "training")
    assert training.total / GIB == pytest.approx(58.0, abs=0.1)
    assert training.verdict == verdict
    assert bool([text for text in memory.problems if "training" in text]) == (verdict != "fits")


def test_a_run_without_kl_term_has_no_reference_weights():
    memory = estimate_memory(loaded("dapo-deepseek-v3-64n8g.v2").recipe)
    assert memory.host_per_node["reference weights"] == 0
    assert {phase.terms.get("reference weights", 0) for phase in memory.phases} == {0}


def test_an_offloaded_optimizer_is_in_host_memory():
    more = [
        "policy.megatron_cfg.optimizer.optimizer_cpu_offload=true",
        "policy.megatron_cfg.optimizer.optimizer_offload_fraction=0.5",
    ]
    plain, offloaded = (estimate_memory(loaded("grpo-qwen3-30ba3b-4n4g", *changes).recipe) for changes in ([], more))
    on_device = plain.phases[0].terms["optimizer"]
    assert offloaded.phases[0].terms["optimizer"] == on_device // 2
    assert offloaded.host_per_node["offloaded optimizer"] == pytest.approx(4 * on_device / 2)


def test_a_model_that_is_not_here_is_said_to_be_unknown():
    with pytest.raises(UnknownModel, match="some/model is no model folder here"):
        estimate_memory(loaded("grpo-qwen3-30ba3b-4n4g", "policy.model_name=some/model").recipe)


def test_a_config_without_a_size_names_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_hidden_layers": 2}))
    recipe = loaded("grpo-llama3.1-8b-instruct-2n4g", f"policy.model_name={tmp_path}").recipe
    assert model_config(recipe.policy)["num_hidden_layers"] == 2
    with pytest.raises(UnknownModel, match="has no 'vocab_size'"):
        estimate_memory(recipe)
