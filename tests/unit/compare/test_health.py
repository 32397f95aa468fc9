"""A run that lacks steps or finite numbers is named with its cause, and nothing of it is averaged."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nemo_rl_moe.compare.as_json import pair_dict
from nemo_rl_moe.compare.comparison import compare
from nemo_rl_moe.compare.ending import cause_of
from nemo_rl_moe.compare.read import read_run
from nemo_rl_moe.compare.run_data import RunData, Series
from nemo_rl_moe.compare.text import pair_lines
from nemo_rl_moe.compare.window import Window, parse_window, ranges
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.load import LoadedRecipe, load_recipe
from nemo_rl_moe.tracking.run_dir import RunDirectory
from tests.unit.compare.published import NEMOTRON, SYNC, write_run
from tests.unit.tracking.conftest import RECIPE


def write(folder: Path, arm: int, **settings: object) -> RunData:
    return read_run(write_run(folder / f"arm{arm}", SYNC, arm, **settings))


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "out of memory"),
        ("ValueError: No available memory for the cache blocks.", "out of memory"),
        ("WorkerDied: policy rank 3 died: the node was running low on memory (883/909 GiB)", "out of memory"),
        ("PhaseTimeout: policy: training step: no answer from policy rank 3 within 3600 s", "time-out"),
        ("RuntimeError: Watchdog caught collective operation timeout: ALLGATHER", "time-out"),
        ("WorkerDied: generation: generation rank 0 died: The actor is dead", "killed"),
        ("ValueError: shapes do not fit", None),
    ],
)
def test_the_cause_is_read_from_the_reason(reason: str, cause: str | None) -> None:
    assert cause_of(reason) == cause


def test_a_run_that_ran_out_of_memory_at_step_12_blocks_the_pair_and_says_why(tmp_path: Path) -> None:
    base = write(tmp_path, 0)
    reason = "OutOfMemoryError: CUDA out of memory\nmore lines"
    run = write(tmp_path, 1, steps=12, exit_code=1, reason=reason)
    (pair,) = compare(base, [run])
    assert (pair.window, pair.blocked, pair.lines) == (Window(2, 20), True, [])
    assert pair.run.problems == [
        "ended at step 12 of 20 (out of memory): OutOfMemoryError: CUDA out of memory",
        "11 of 19 steps logged; missing 13-20",
    ]
    text = "\n".join(pair_lines(pair))
    assert "arm1: ended at step 12 of 20 (out of memory)" in text
    assert "--steps 2-12 compares what both have" in text and "%" not in text.split("Configuration")[0]


def test_the_same_run_compared_over_the_steps_it_has_still_says_that_it_ended_early(tmp_path: Path) -> None:
    base, run = (
        write(tmp_path, 0),
        write(tmp_path, 1, steps=12, exit_code=1, reason="PhaseTimeout: refit: no answer from x"),
    )
    (pair,) = compare(base, [run], window=Window(2, 12))
    assert not pair.blocked and pair.lines
    assert pair.run.problems == ["ended at step 12 of 20 (time-out): PhaseTimeout: refit: no answer from x"]


def test_a_manifest_without_an_end_is_a_run_that_was_killed(tmp_path: Path) -> None:
    run = write(tmp_path, 1, steps=7, exit_code=None, reason=None)
    assert (run.ending.state, run.ending.cause) == ("killed", "killed")


def test_an_interrupted_run_says_at_which_step(tmp_path: Path) -> None:
    (pair,) = compare(write(tmp_path, 0), [write(tmp_path, 1, steps=9, exit_code=130, reason="interrupted")])
    assert pair.run.problems[0].startswith("ended at step 9 of 20 (interrupted)")


def test_a_run_whose_process_holds_its_directory_is_still_running(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE)
    loaded: LoadedRecipe = load_recipe(path, [f"logger.log_dir={tmp_path / 'run'}"], check=False)
    directory = RunDirectory.open(loaded, resume=False)
    row = json.dumps({"step": 1, "train/reward": 0.5}) + "\n"
    (tmp_path / "run/metrics.jsonl").write_text(row)
    assert read_run(tmp_path / "run").ending.state == "running"
    directory.close()
    assert read_run(tmp_path / "run").ending.state == "killed"


def test_data_that_ended_before_the_last_step_is_an_early_end_although_the_run_is_done(tmp_path: Path) -> None:
    (pair,) = compare(write(tmp_path, 0), [write(tmp_path, 1, steps=15)])
    assert pair.run.problems[0] == "ended at step 15 of 20, with no cause given"


def edited(run: RunData, edit: Callable[[Series], Series], metric: str) -> RunData:
    return RunData(run.name, run.path, run.source, {**run.series, metric: edit(run.series[metric])}, run.config)


def test_a_missing_step_in_the_middle_blocks_the_pair(tmp_path: Path) -> None:
    base, run = write(tmp_path, 0), write(tmp_path, 1)
    rows = (run.path / "metrics.jsonl").read_text().splitlines()
    (run.path / "metrics.jsonl").write_text("\n".join(rows[:6] + rows[8:]) + "\n")
    (pair,) = compare(base, [read_run(run.path)])
    assert pair.run.problems == ["17 of 19 steps logged; missing 7-8"]
    assert pair.blocked and pair_dict(pair)["run"]["missing_steps"] == [7, 8]


def test_a_metric_that_was_not_finite_at_step_7_has_no_mean_and_the_others_have_theirs(tmp_path: Path) -> None:
    def spoil(series: Series) -> Series:
        values = series.values.copy()
        values[6] = math.nan
        return Series(series.steps, values)

    base, run = write(tmp_path, 0), edited(write(tmp_path, 1), spoil, "train/gen_kl_error")
    (pair,) = compare(base, [run])
    lines = {line.row.key: line for line in pair.lines if line.kind == "mean"}
    assert lines["gen_kl_error"].change is None and lines["gen_kl_error"].note == "arm1: not finite at step 7"
    assert lines["reward"].change is not None
    assert pair.run.problems == ["train/gen_kl_error is not finite at step 7"]


def test_a_metric_logged_at_18_of_19_steps_has_no_mean(tmp_path: Path) -> None:
    base, run = (
        write(tmp_path, 0),
        edited(write(tmp_path, 1), lambda s: Series(s.steps[:-1], s.values[:-1]), "train/reward"),
    )
    (pair,) = compare(base, [run])
    (line,) = [line for line in pair.lines if line.row.key == "reward"]
    assert line.run is None and line.note == "arm1 logged train/reward at 18 of 19 steps"


def test_a_metric_that_only_one_run_logs_is_named(tmp_path: Path) -> None:
    base, run = write(tmp_path, 0), read_run(write_run(tmp_path / "n", NEMOTRON, 1))
    (pair,) = compare(base, [run])
    (line,) = [line for line in pair.lines if line.row.key == "tokens_per_sample"]
    assert line.note == "arm0 does not log train/mean_tokens_per_sample"


def test_a_validation_that_one_run_made_alone_is_named_and_not_compared(tmp_path: Path) -> None:
    base, run = write(tmp_path, 0), write(tmp_path, 1)
    run = edited(run, lambda s: Series(np.array([19]), s.values), "validation/accuracy")
    (pair,) = compare(base, [run])
    assert pair.accuracies == []
    assert pair.warnings == [
        "validation/accuracy: step 20 validated by arm0 only, not compared",
        "validation/accuracy: step 19 validated by arm1 only, not compared",
    ]


@pytest.mark.parametrize("text", ["2", "20-2", "0-5", "a-b", "2-20-3", "-3"])
def test_a_window_that_is_none_is_a_user_error(text: str) -> None:
    with pytest.raises(UserError, match="expected A-B"):
        parse_window(text)


def test_step_numbers_are_put_into_words() -> None:
    assert ranges([3, 7, 8, 9, 12]) == "3, 7-9, 12"
    assert ranges([1, 3, 5, 7, 9, 10]) == "1, 3, 5, 7 and 2 more"
