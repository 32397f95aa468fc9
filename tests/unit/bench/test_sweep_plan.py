"""Risk: a sweep that runs what cannot run, leaves out what could, or ranks something else than what it then runs."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import pytest
import yaml

from nemo_rl_moe.bench.sweep.expand import BASE, InvalidPoint, Point, Sweep
from nemo_rl_moe.bench.sweep.rank import Ranking, gains, rank
from nemo_rl_moe.cli import main
from nemo_rl_moe.recipe.load import load_recipe
from nemo_rl_moe.recipe.memory.estimate import estimate_memory
from nemo_rl_moe.recipe.schema import Recipe
from nemo_rl_moe.recipe.source import RecipeError

PRETRAIN = Path("examples/configs/recipes/llm/pretrain")
SWEEP = PRETRAIN / "megatron_moe_qwen235BA22B-sweep.yaml"
RANKS = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"


def written(folder: Path, axes: dict, combine: str = "product") -> Sweep:
    """A sweep of the baseline from a file of its own, so that nothing of the shipped one's axes is left."""
    path = folder / "jupiter-sweep.yaml"
    base = (PRETRAIN / "megatron_moe_qwen235BA22B.yaml").resolve()
    path.write_text(yaml.safe_dump({"defaults": str(base), "benchmark": {"sweep": {"axes": axes, "combine": combine}}}))
    return Sweep(load_recipe(path))


def named(made: Sweep) -> dict[str, Point]:
    return {point.name: point for point in made.points()}


def reasons(made: Sweep, name: str) -> list[str]:
    with pytest.raises(InvalidPoint) as error:
        made.recipe(named(made)[name])
    return error.value.reasons


def test_a_product_has_every_combination_once_and_the_base_first(tmp_path: Path) -> None:
    made = written(tmp_path, {"ep": [8, 16], "overlap": [False, True], "mbs": [1, 2]})
    points = list(made.points())
    assert points[0].name == BASE and points[0].changes == {}
    found = {(p.changes.get("ep", 16), p.changes.get("overlap", False), p.changes.get("mbs", 1)) for p in points}
    assert len(points) == 8 and found == set(itertools.product([8, 16], [False, True], [1, 2]))
    assert points[-1].name == "mbs2-overlap-on"


def test_single_changes_one_axis_at_a_time_and_pairs_two() -> None:
    single, pairs = (Sweep(load_recipe(SWEEP, [f"benchmark.sweep.combine={how}"])) for how in ("single", "pairs"))
    counts = [len([v for v in vs if v != single.base_values[n]]) for n, vs in single.settings.axes.items()]
    assert len(list(single.points())) == 1 + sum(counts)
    assert len(list(pairs.points())) == 1 + sum(counts) + sum(a * b for a, b in itertools.combinations(counts, 2))


def test_the_base_of_the_shipped_sweep_is_the_baseline_with_vpp_3() -> None:
    made = Sweep(load_recipe(SWEEP))
    assert made.base_values == {
        "tp": 2,
        "pp": 8,
        "vpp": 3,
        "ep": 16,
        "recompute": "moe_act+layernorm",
        "precision": "fp8-blockwise-param",
        "overlap": False,
        "graphs": "none",
    }
    own, base = (load_recipe(PRETRAIN / "megatron_moe_qwen235BA22B.yaml").recipe, made.recipe(next(made.points())))
    assert base == own


def test_what_depends_on_an_axis_follows_it(tmp_path: Path) -> None:
    axes = {"tp": [4], "pp": [16], "vpp": [3], "ep": [2], "overlap": [True], "graphs": ["moe_router+moe_preprocess"]}
    made = written(tmp_path, axes)
    point = next(p for p in made.points() if p.name != BASE)
    recipe = made.recipe(point)
    megatron = recipe.policy.megatron_cfg
    assert recipe.policy.make_sequence_length_divisible_by == 4 and megatron.sequence_parallel
    assert megatron.num_layers_per_virtual_pipeline_stage == 2  # 96 slots / 16 / 3
    assert megatron.delay_wgrad_compute and megatron.cuda_graph_scope == ["moe_router", "moe_preprocess"]
    env = megatron.env_vars
    assert env[RANKS] == "2" and env["CUDA_DEVICE_MAX_CONNECTIONS"] == "32" and env["NCCL_GRAPH_REGISTER"] == "0"


def test_without_hybridep_its_keys_go_and_only_one_number_of_sms_is_left(tmp_path: Path) -> None:
    made = written(tmp_path, {"dispatcher": ["hybridep", "alltoall", "deepep"], "sms": [16, 32]})
    recipe = made.recipe(named(made)["dispatcher-alltoall-sms16"])
    assert recipe.policy.megatron_cfg.moe_hybridep_num_sms is None and recipe.policy.megatron_cfg.env_vars is None
    assert reasons(made, "dispatcher-deepep") == ["sms: 32 has no effect with dispatcher deepep"]
    assert made.recipe(named(made)["sms16"]).policy.megatron_cfg.moe_hybridep_num_sms == 16


def test_a_point_that_breaks_rules_has_each_with_the_nearest_values_that_would_do(tmp_path: Path) -> None:
    made = written(tmp_path, {"ep": [24], "pp": [5], "vpp": [5], "gbs": [2047]})
    point = next(p.name for p in made.points() if p.name != BASE)
    found = reasons(made, point)
    assert any("256 training devices are not a multiple of TP 2 x PP 5" in reason for reason in found)
    assert any("EP 24 does not divide the model's 128 experts, expected 16 or 32" in reason for reason in found)
    assert reasons(written(tmp_path, {"vpp": [5]}), "vpp5") == [
        "virtual pipeline: VPP 5 does not divide the 12 layers of a stage; 4 or 6 would"
    ]


def test_any_key_of_the_recipe_can_be_an_axis(tmp_path: Path) -> None:
    key = "policy.megatron_cfg.env_vars.CUDA_DEVICE_MAX_CONNECTIONS"
    made = written(tmp_path, {key: ["1", "8"], "grpo.seed": [42, 7], "policy.megatron_cfg.optimizer.lr": [0.1]})
    recipe = made.recipe(named(made)["seed7-CUDA_DEVICE_MAX_CONNECTIONS-8-lr-0.1"])
    assert recipe.policy.megatron_cfg.env_vars["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert recipe.grpo.seed == 7 and recipe.policy.megatron_cfg.optimizer.lr == 0.1
    assert recipe.policy.megatron_cfg.env_vars[RANKS] == "4"


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"tpp": [1]}, "unknown axis; did you mean tp"),
        ({"policy.megatron_cfg.moe_rooter_dtype": ["fp32"]}, "did you mean policy.megatron_cfg.moe_router_dtype"),
        ({"ep": []}, "found no value, expected at least one"),
        ({"ep": ["8"]}, "found '8', expected a whole number of 1 or more"),
        ({"ep": [8, 8]}, "8 is there twice"),
        ({"overlap": [1]}, "found 1, expected one of true, false"),
        ({"precision": ["fp8"]}, "expected one of bf16, fp8-tensorwise"),
        ({"recompute": ["moe_act+norms"]}, "expected none, full, or any of core_attn"),
        ({"policy.megatron_cfg.moe_router_dtype": ["fp16"]}, "found 'fp16': "),
    ],
    ids=str,
)
def test_a_wrong_axis_is_refused_with_its_line_and_what_is_expected(tmp_path: Path, axes: dict, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        written(tmp_path, axes)
    assert message in str(error.value) and "jupiter-sweep.yaml:" in str(error.value)


def test_memory_and_speed_of_a_ranked_point_are_those_of_its_recipe(tmp_path: Path) -> None:
    made = written(tmp_path, {"ep": [8], "tp": [1, 2], "recompute": ["none"]})
    ranking = rank(made)
    (best,) = (c for c in ranking.kept if c.point.name == "ep8-recompute-none")
    recipe = made.recipe(best.point)
    assert best.memory.total == max(phase.total for phase in estimate_memory(recipe).phases)
    assert [(p.name, r) for p, r in ranking.dropped] == [
        ("ep8-recompute-none-tp1", ["memory: 138.8 GiB with the least overhead on pipeline stage 1"])
    ]


def test_points_are_ranked_by_predicted_tokens_a_second_and_ties_by_fit_and_size_of_the_change(tmp_path: Path) -> None:
    axes = {"ep": [8, 16, 32], "overlap": [False, True], "graphs": ["none", "moe_router+moe_preprocess"]}
    axes |= {"recompute": ["moe_act+layernorm", "none"], "precision": ["fp8-blockwise-param", "fp8-tensorwise-param"]}
    ranking = rank(written(tmp_path, axes))
    speeds = [gain for _, gain in gains(ranking)]
    assert speeds == sorted(speeds, reverse=True) and speeds[0] > 1.4
    assert ranking.kept[0].point.changes == {
        "ep": 8,
        "recompute": "none",
        "overlap": True,
        "graphs": "moe_router+moe_preprocess",
    }


def test_a_batch_twice_as_large_is_not_twice_as_fast(tmp_path: Path) -> None:
    ranking = rank(written(tmp_path, {"gbs": [4096]}))
    ((_, gain),) = gains(ranking)
    assert 1.0 < gain < 1.02  # The bubble and the gradients are shared by more tokens.


def test_without_a_gpu_type_points_keep_the_order_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny-sweep.yaml"
    tiny = Path("examples/configs/recipes/llm/grpo-tiny-moe-cpu-ep2.yaml").resolve()
    axes = {"policy.train_micro_batch_size": [4, 1]}
    path.write_text(yaml.safe_dump({"defaults": str(tiny), "benchmark": {"sweep": {"axes": axes}}}))
    ranking = rank(Sweep(load_recipe(path)))
    assert [c.step for c in ranking.kept] == [None] * len(ranking.kept) and ranking.kept


def test_the_command_prints_the_plan_and_its_json(capsys: pytest.CaptureFixture[str]) -> None:
    single = [str(SWEEP), "benchmark.sweep.combine=single"]
    assert main(["bench", "sweep", *single, "--top", "2", "--measured", "172.5"]) == 0
    text = capsys.readouterr().out
    assert "15 left, 1 dropped" in text
    assert "overlap true" in text and "--top N shows more" in text and "scaled by" in text
    assert main(["bench", "sweep", *single, "--json", "--measured", "172.5"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["base"]["tflops"] == pytest.approx(172.5) and answer["kept"][0]["changes"] == {"overlap": True}
    assert answer["combinations"] == 17 and answer["dropped"][0]["reasons"]
    assert sum(answer["base"]["parts"].values()) * 177.8 / 172.5 == pytest.approx(
        answer["base"]["step_seconds"], rel=0.01
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--top", "0"], "--top 0: expected 1 or more"),
        (["--measured", "-1"], "--measured -1: expected TFLOP/s/GPU above 0"),
        (["benchmark.sweep=null"], "benchmark.sweep: missing"),
    ],
)
def test_wrong_options_are_refused(capsys: pytest.CaptureFixture[str], arguments: list, message: str) -> None:
    assert main(["bench", "sweep", str(SWEEP), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_10_000_points_are_checked_and_ranked_in_under_10_seconds_of_one_core(tmp_path: Path) -> None:
    axes = {"tp": [1, 2, 4], "pp": [4, 8, 16], "vpp": [2, 3, 4, 6], "ep": [4, 8, 16, 32], "sms": [8, 32]}
    axes |= {"recompute": ["moe_act+layernorm", "moe_act", "none"], "precision": ["fp8-blockwise-param", "bf16"]}
    axes |= {"overlap": [False, True], "graphs": ["none", "moe_router+moe_preprocess", "moe_router"]}
    made = written(tmp_path, axes)
    began = time.process_time()
    ranking: Ranking = rank(made)
    spent = time.process_time() - began
    assert len(ranking.kept) + len(ranking.dropped) >= 10_000
    assert spent < 10


def test_ranking_needs_no_recipe_twice_and_keeps_none() -> None:
    ranking = rank(Sweep(load_recipe(SWEEP, ["benchmark.sweep.combine=single"])))
    assert not any(isinstance(value, Recipe) for c in ranking.kept for value in vars(c).values())
