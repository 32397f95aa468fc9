"""What goes into a placement: files, recipes, runs. Risk: a wrong number taken in silence."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from nemo_rl_moe.bench.placement.distributions import groups
from nemo_rl_moe.bench.placement.predict import predict
from nemo_rl_moe.bench.placement.simulate import Steps
from nemo_rl_moe.bench.placement.splits import batch_of, possible_splits, required_changes
from nemo_rl_moe.bench.placement.workload import Empirical, Lognormal, SpeedPoint, load_workload, phase_seconds
from nemo_rl_moe.cli import main
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.load import load_recipe
from tests.unit.bench.placement_cases import workload
from tests.unit.recipes.writing import PERFORMANCE, TINY, write

GOOD = """
response_tokens: {distribution: constant, tokens: 100}
generation: {decode_latency_s: 0, peak_tokens_per_second: 20}
training:
  - {devices: 4, tokens_per_second_per_device: 10}
refit: {colocated_s: 3, split_s: 1}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("refit:", "refits:", "5: refits: unknown key; nearest: refit"),
        ("refit: {colocated_s: 3, split_s: 1}", "", "refit: the key is missing and has no default"),
        ("tokens: 100", "tokens: none", "1: response_tokens.tokens: found 'none': input should be a valid number"),
        ("devices: 4", "devices: 0", "4: training[0].devices: found 0: input should be greater than 0"),
        ("distribution: constant", "distribution: gamma", "1: response_tokens: input tag 'gamma' found"),
        (
            "training:\n",
            "training:\n  - {devices: 4, tokens_per_second_per_device: 9}\n",
            "two speeds for the same number",
        ),
        ("constant, tokens: 100", "lognormal, sigma: 1", "1: response_tokens.mean: the key is missing"),
        ("training:", "\ttraining:", "tab in the indentation"),
    ],
)
def test_a_wrong_workload_file_is_reported_with_its_line_and_key(tmp_path, old, new, message):
    with pytest.raises(UserError) as caught:
        load_workload(write(tmp_path, "w.yaml", GOOD.replace(old, new)))
    assert message in str(caught.value) and "w.yaml" in str(caught.value)


def test_the_command_exits_with_2_for_a_missing_file_or_run_and_for_no_source(tmp_path, capsys):
    assert main(["bench", "placement", str(TINY), "--workload", str(tmp_path / "none.yaml")]) == 2
    assert "no such workload file" in capsys.readouterr().err
    assert main(["bench", "placement", str(TINY), "--from-run", str(tmp_path)]) == 2
    assert "no config.yaml, expected the directory of a run" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "placement", str(TINY)])


def test_speed_between_8_and_16_devices_is_the_geometric_mean_at_their_geometric_mean_and_constant_outside():
    points = [
        SpeedPoint(devices=4, tokens_per_second_per_device=90.0),
        SpeedPoint(devices=16, tokens_per_second_per_device=10.0),
    ]
    assert phase_seconds(points, 2400.0, 8) == pytest.approx(2400 / (8 * 30))
    assert phase_seconds(points, 2400.0, 16) == pytest.approx(2400 / (16 * 10))
    assert phase_seconds(points, 2400.0, 2) == pytest.approx(2400 / (2 * 90))
    assert phase_seconds(points, 2400.0, 32) == pytest.approx(2400 / (32 * 10))
    assert phase_seconds([], 2400.0, 8) == 0


@pytest.mark.parametrize(("mean", "sigma"), [(100.0, 0.3), (700.0, 0.6), (950.0, 1.5)])
def test_lognormal_lengths_have_their_mean_after_the_cut_at_1000(mean, sigma):
    lengths = Lognormal(distribution="lognormal", mean=mean, sigma=sigma)
    drawn = np.concatenate(list(islice(groups(lengths, 1000, 1000.0, seed=0), 200)))
    assert drawn.max() <= 1000
    assert drawn.mean() == pytest.approx(mean, rel=0.01)


def test_a_mean_at_the_limit_of_1000_is_refused_and_observed_lengths_are_cut_there():
    with pytest.raises(UserError, match=r"response_tokens.mean: 1000, expected less than the recipe's limit of 1000"):
        next(groups(Lognormal(distribution="lognormal", mean=1000.0, sigma=1.0), 4, 1000.0, seed=0))
    observed = Empirical(distribution="empirical", tokens=[500.0, 2000.0])
    assert set(next(groups(observed, 100, 1000.0, seed=0))) == {500.0, 1000.0}


def test_a_recipe_on_64_and_64_gpus_can_be_split_by_whole_policies_of_16_and_engines_of_8():
    recipe = load_recipe(PERFORMANCE / "grpo-qwen3-235b-32n4g-async-1off.yaml").recipe
    assert possible_splits(recipe) == [16, 32, 48, 64, 80, 96, 112]
    assert required_changes(recipe, 64) == []
    assert required_changes(recipe, 48) == [
        "expert layout of 64 ranks (EP x ETP x PP) does not divide 48 devices",
        "train_global_batch_size 512 is not a multiple of DP 3",
        "segments of 16 nodes do not divide the nodes of each side",
    ]
    assert batch_of(recipe, workload()).max_age == 1


def test_recipes_that_the_simulation_does_not_cover_are_refused():
    dynamic = load_recipe(TINY, ["++grpo.use_dynamic_sampling=true"], check=False).recipe
    with pytest.raises(UserError, match=r"grpo.use_dynamic_sampling: true"):
        batch_of(dynamic, workload())
    with pytest.raises(UserError, match="leave no token for a response"):
        batch_of(load_recipe(TINY).recipe, workload(prompt_tokens=1e6))


def test_json_of_a_one_device_recipe_has_no_split(tmp_path: Path, capsys):
    file = write(tmp_path, "w.yaml", GOOD)
    assert main(["bench", "placement", str(TINY), "--workload", str(file), "--json", "--steps", "1"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["splits"], document["best_split"]) == ([], None)
    assert document["why"] == ["no split: trainer and generator need whole copies of the model on devices of their own"]


def test_of_95_splits_over_192_devices_about_a_third_is_simulated_and_the_recipes_own_is_among_them():
    recipe = load_recipe(PERFORMANCE / "grpo-qwen3-30ba3b-24n8g-async-8off.yaml").recipe
    short = recipe.model_copy(update={"grpo": recipe.grpo.model_copy(update={"num_generations_per_prompt": 2})})
    prediction = predict(short, workload(), Steps(count=1, warmup=0))
    assert prediction.own.outcome.policy_devices == 128
    assert len(possible_splits(recipe)) == len(prediction.splits) + prediction.skipped == 95
    assert 32 <= len(prediction.splits) <= 60
