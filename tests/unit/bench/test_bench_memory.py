"""Memory of the Jupiter baseline against a calculation of its own, and of a published run against its measured peak."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_rl_moe.bench.memory.command import stage_rows
from nemo_rl_moe.cli import main
from nemo_rl_moe.recipe.load import load_recipe, refuse_unsupported
from nemo_rl_moe.recipe.memory.estimate import Phase, estimate_memory
from nemo_rl_moe.recipe.memory.gpus import GIB
from nemo_rl_moe.recipe.schema import Recipe
from nemo_rl_moe.recipe.source import RecipeError

CONFIGS = Path("examples/configs/recipes/llm")
BASE = CONFIGS / "pretrain/megatron_moe_qwen235BA22B.yaml"
MEGATRON = "policy.megatron_cfg"
KEYS = {
    "tp": f"{MEGATRON}.tensor_model_parallel_size",
    "pp": f"{MEGATRON}.pipeline_model_parallel_size",
    "chunk": f"{MEGATRON}.num_layers_per_virtual_pipeline_stage",
    "ep": f"{MEGATRON}.expert_model_parallel_size",
}
BF16 = [f"{MEGATRON}.fp8_cfg.enabled=false", f"{MEGATRON}.fp8_cfg.fp8_param=false"]
NOTHING_TWICE = [f"{MEGATRON}.activation_checkpointing=false", f"{MEGATRON}.recompute_granularity=full"]
NOTHING_TWICE += [f"{MEGATRON}.recompute_modules=null"]


def recipe(*overrides: str, **layout: int) -> Recipe:
    sizes = [f"{KEYS[name]}={value}" for name, value in layout.items()]
    if layout.get("tp"):
        sizes.append(f"policy.make_sequence_length_divisible_by={layout['tp']}")
        sizes.append(f"{MEGATRON}.sequence_parallel={str(layout['tp'] > 1).lower()}")
    return load_recipe(BASE, [*sizes, *overrides]).recipe


def stages(made: Recipe) -> list[Phase]:
    return [phase for phase in estimate_memory(made).phases if phase.name == "training"]


def state_and_activations(made: Recipe) -> float:
    """GiB of the first stage without logits and dispatcher."""
    terms = stages(made)[0].terms
    names = ("weights", "gradients", "optimizer", "fp8 weights", "activations")
    return sum(terms.get(name, 0) for name in names) / GIB


@pytest.mark.parametrize(
    ("layout", "recomputed", "whole"),
    [
        ({}, 63, 72),
        ({"chunk": 3}, 61, 69),
        ({"chunk": 3, "ep": 32}, 56, 65),
        ({"chunk": 3, "ep": 8}, 70, 79),
        ({"chunk": 3, "tp": 4}, 40, 44),
        ({"chunk": 3, "tp": 1, "ep": 32}, 98, 115),
        ({"chunk": 4, "pp": 4, "ep": 32}, 63, 71),
    ],
    ids=str,
)
def test_seven_layouts_of_235b_are_within_1_5_gib_of_a_calculation_made_by_hand(
    layout: dict, recomputed: int, whole: int
) -> None:
    """The published calculation counts slots as layers on stage 0, and no layer at work."""
    assert state_and_activations(recipe(*BF16, **layout)) == pytest.approx(recomputed, abs=1.5)
    assert state_and_activations(recipe(*BF16, *NOTHING_TWICE, **layout)) == pytest.approx(whole, abs=1.5)


def test_the_baseline_has_96_slots_in_8_stages_of_3_chunks_of_which_31_are_in_flight_first() -> None:
    rows = stage_rows(recipe())
    assert [row["layers"] for row in rows] == [11, 12, 12, 12, 12, 12, 12, 11]
    assert {row["slots"] for row in rows} == {12} and {row["chunks"] for row in rows} == {3}
    assert [row["chunks_in_flight"] for row in rows] == [31, 29, 27, 25, 23, 21, 19, 17]


def test_overlap_holds_one_more_chunk() -> None:
    with_overlap = recipe(f"{MEGATRON}.overlap_moe_expert_parallel_comm=true")
    assert [row["chunks_in_flight"] for row in stage_rows(with_overlap)][:2] == [32, 30]
    more = stages(with_overlap)[1].terms["activations"] / stages(recipe())[1].terms["activations"]
    assert more == pytest.approx(30 / 29, rel=0.01)


def test_bfloat16_moments_save_4_of_12_bytes_of_optimizer_state() -> None:
    formats = [f"{MEGATRON}.optimizer.{name}=bf16" for name in ("exp_avg_dtype", "exp_avg_sq_dtype")]
    small = recipe(f"{MEGATRON}.optimizer.use_precision_aware_optimizer=true", *formats)
    assert stages(small)[1].terms["optimizer"] * 12 == stages(recipe())[1].terms["optimizer"] * 8


def test_fp8_weights_of_hopper_cost_nothing_with_fp8_parameters_and_two_bytes_without() -> None:
    assert "fp8 weights" not in stages(recipe())[1].terms
    terms = stages(recipe(f"{MEGATRON}.fp8_cfg.fp8_param=false"))[1].terms
    # All of stage 1 but norms and routers are matrices: 12 layers x (128 experts + 2 norms).
    assert terms["fp8 weights"] == pytest.approx(terms["weights"], rel=0.01)


def test_a_published_run_of_30b_on_16_h100s_that_peaked_at_62_17_gib_is_predicted_within_10_percent() -> None:
    """Megatron-Bridge's card: TP 1, PP 1, EP 16, bfloat16 gradients, no recomputation, micro-batch 1 of 4096 tokens."""
    keys = ["expert_model_parallel_size=16", "tensor_model_parallel_size=1", "sequence_parallel=false"]
    keys += ["activation_checkpointing=false", "freeze_moe_router=false", "moe_hybridep_prepad_packed_inputs=false"]
    others = ["cluster.num_nodes=2", "policy.sequence_packing.enabled=false", "benchmark.policy_only=true"]
    others += ["policy.train_global_batch_size=1024", "policy.make_sequence_length_divisible_by=1"]
    path = CONFIGS / "performance/grpo-qwen3-30ba3b-4n8g.yaml"
    made = load_recipe(path, [*others, *(f"{MEGATRON}.{key}" for key in keys)], check=False).recipe
    assert made.policy.train_micro_batch_size == 1 and made.policy.max_total_sequence_length == 4096
    assert stages(made)[0].total / GIB == pytest.approx(62.17, rel=0.1)


def test_a_recipe_for_the_policy_alone_has_neither_engine_nor_log_probabilities_and_run_refuses_it() -> None:
    loaded = load_recipe(BASE)
    assert {phase.name for phase in estimate_memory(loaded.recipe).phases} == {"training"}
    with pytest.raises(RecipeError, match=r"benchmark\.policy_only"):
        refuse_unsupported(loaded)


def test_the_command_prints_every_stage_with_its_terms_and_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "memory", str(BASE)]) == 0
    text = capsys.readouterr().out
    assert "    1      12   29/3" in text and text.count("  fits") == 8 and "activations" in text
    assert main(["bench", "memory", str(BASE), "--json", "cluster.gpu_memory_gib=60"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["device_bytes"] == 60 * GIB and "does not fit" in answer["problems"][0]
    assert len(answer["stages"]) == 8


def test_the_command_shows_the_engine_of_a_colocated_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "memory", str(CONFIGS / "performance/grpo-qwen3-30ba3b-4n4g.yaml")]) == 0
    text = capsys.readouterr().out
    assert "key/value cache" in text and "reference weights" in text and "one engine caches" in text


def test_a_model_that_is_not_here_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "memory", str(BASE), "policy.model_name=some/model"]) == 2
    assert "some/model is no model folder here" in capsys.readouterr().err
