"""Workloads read from runs. Risk: a prediction that does not even repeat the run it was measured in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_rl_moe.bench.placement.measured import check_runs, measured_workload, read_run
from nemo_rl_moe.bench.placement.predict import predict_own
from nemo_rl_moe.bench.placement.simulate import Outcome, Steps
from nemo_rl_moe.bench.placement.workload import Workload
from nemo_rl_moe.cli import main
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.commands import to_yaml
from nemo_rl_moe.recipe.load import load_recipe
from nemo_rl_moe.tracking.metrics_log import MetricsLog
from tests.unit.bench.placement_cases import workload
from tests.unit.recipes.writing import TINY

TWO_DEVICES = ("cluster.gpus_per_node=2", "++cluster.cpus_per_device=1")
SPLIT = ("policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.gpus_per_node=1")
TRUTH = workload(
    generation={"decode_latency_s": 0.01, "peak_tokens_per_second": 4000.0},
    response_tokens={"distribution": "constant", "tokens": 12.0},
    prompt_tokens=20.0,
    training=[{"devices": 2, "tokens_per_second_per_device": 3000.0}],
    logprobs=[{"devices": 2, "tokens_per_second_per_device": 9000.0}],
    refit={"colocated_s": 0.25, "split_s": 0.25},
    reward_s=0.125,
    other_s=0.5,
)


def write_run(folder: Path, overrides: tuple[str, ...], truth: Workload = TRUTH, rollouts: bool = True) -> Outcome:
    """A run directory whose three steps are those of a simulation; the first is a warm-up of twice the time."""
    folder.mkdir()
    loaded = load_recipe(TINY, [f"++{item.lstrip('+')}" for item in overrides], check=False)
    (folder / "config.yaml").write_text(to_yaml(loaded.resolved))
    out = predict_own(loaded.recipe, truth, Steps(count=3))
    asynchronous = not loaded.recipe.policy.generation.colocated.enabled
    metrics = {
        "total_step_time": out.step_s,
        "generation": out.exposed_generation_s - truth.reward_s,
        "exposed_generation": out.exposed_generation_s - (0 if asynchronous else truth.reward_s),
        "reward": truth.reward_s,
        "policy_and_reference_logprobs": out.logprob_s,
        "policy_training": out.training_s,
        "weight_sync": out.refit_s,
    }
    log = MetricsLog(folder / "metrics.jsonl")
    for step, factor in ((1, 2.0), (2, 1.0), (3, 1.0)):
        timing = {f"timing/train/{name}": factor * seconds for name, seconds in metrics.items()}
        log.log(step, timing | {"train/mean_tokens_per_sample": 32.0})
    log.log(3, {"validation/accuracy": 0.5})
    log.close()
    if rollouts:
        (folder / "rollouts").mkdir()
        sample = {"problem": "p" * 40, "response": "r" * 24, "truncated": False}
        (folder / "rollouts/step_2.jsonl").write_text(json.dumps(sample) + "\n")
    return out


@pytest.mark.parametrize("rollouts", [True, False])
def test_a_sync_run_is_repeated_within_1_percent_with_and_without_rollouts(tmp_path, rollouts):
    out = write_run(tmp_path / "run", TWO_DEVICES, rollouts=rollouts)
    runs = [read_run(tmp_path / "run")]
    measured = measured_workload(runs)
    assert measured.prompt_tokens == pytest.approx(20 if rollouts else 32 - 16)
    assert measured.training[0].tokens_per_second_per_device == pytest.approx(3000)
    assert measured.other_s == pytest.approx(0.5)
    (check,) = check_runs(runs, measured)
    assert check.measured_step_s == pytest.approx(out.step_s)
    assert abs(check.error) < 0.01


def test_two_sync_runs_of_different_load_give_latency_and_peak_and_foretell_async(tmp_path):
    write_run(tmp_path / "full", TWO_DEVICES)
    write_run(tmp_path / "half", (*TWO_DEVICES, "grpo.num_prompts_per_step=8", "policy.train_global_batch_size=32"))
    measured = measured_workload([read_run(tmp_path / name) for name in ("full", "half")])
    assert measured.generation.decode_latency_s == pytest.approx(0.01)
    assert measured.generation.peak_tokens_per_second == pytest.approx(4000)
    split = load_recipe(TINY, [f"++{item.lstrip('+')}" for item in (*TWO_DEVICES, *SPLIT)], check=False).recipe
    assert predict_own(split, measured).step_s == pytest.approx(predict_own(split, TRUTH).step_s, rel=0.01)


def test_cut_responses_of_the_limit_of_tokens_give_the_length_of_a_character(tmp_path):
    write_run(tmp_path / "run", TWO_DEVICES)
    limit = read_run(tmp_path / "run").recipe.policy.generation.max_new_tokens
    rows = [("r" * 60, True), ("r" * 30, False)]
    text = "\n".join(json.dumps({"problem": "p", "response": r, "truncated": cut}) for r, cut in rows)
    (tmp_path / "run/rollouts/step_3.jsonl").write_text(text + "\n")
    (tmp_path / "run/rollouts/step_2.jsonl").unlink()
    run = read_run(tmp_path / "run")
    assert run.responses == pytest.approx([limit, limit / 2])
    assert run.prompt_tokens + run.response_tokens == pytest.approx(32)


def test_the_command_shows_measured_against_simulated(tmp_path, capsys):
    write_run(tmp_path / "run", TWO_DEVICES)
    assert main(["bench", "placement", str(TINY), *TWO_DEVICES, "--from-run", str(tmp_path / "run")]) == 0
    text = capsys.readouterr().out
    assert "simulated against measured step time" in text
    assert "1:1 " in text


def test_runs_on_devices_of_two_cores_say_nothing_about_devices_of_one(tmp_path, capsys):
    write_run(tmp_path / "run", ("cluster.gpus_per_node=1", "cluster.cpus_per_device=2"))
    assert main(["bench", "placement", str(TINY), *TWO_DEVICES, "--from-run", str(tmp_path / "run")]) == 2
    assert "ran on cpu devices of 2 core(s), expected cpu devices of 1 core(s)" in capsys.readouterr().err


def test_a_run_without_a_metric_or_without_a_step_after_warmup_is_refused(tmp_path):
    write_run(tmp_path / "run", TWO_DEVICES)
    file = tmp_path / "run/metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines).replace("timing/train/weight_sync", "timing/train/other"))
    with pytest.raises(UserError, match="step 2 has no timing/train/weight_sync"):
        read_run(tmp_path / "run")
    file.write_text(lines[0])
    with pytest.raises(UserError, match=r"1 training step\(s\), expected more than 1"):
        read_run(tmp_path / "run")
