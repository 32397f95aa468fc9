"""The same run reads the same from its directory, from W&B in every form it comes in, and from NeMo-RL's dump."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from nemo_rl_moe.compare.read import distinct_names, read_run, read_runs
from nemo_rl_moe.compare.run_data import RunData
from nemo_rl_moe.compare.wandb_file import items, records
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.load import LoadedRecipe, load_recipe
from nemo_rl_moe.tracking.run_dir import RunDirectory
from nemo_rl_moe.tracking.tracker import Tracker
from tests.unit.compare.published import NEMOTRON, config, rows
from tests.unit.tracking.conftest import RECIPE
from tests.unit.tracking.wandb_file import finished_records

ROWS = rows(NEMOTRON, 0)
NEMO_RL_NAMES = {
    "train/mean_tokens_per_sample": "train/mean_total_tokens_per_sample",
    "timing/train/weight_sync": "timing/train/prepare_for_generation/total",
}


def nemo_rl(row: dict[str, float]) -> dict[str, float]:
    """A row as NeMo-RL names it."""
    return {NEMO_RL_NAMES.get(name, name): value for name, value in row.items() if name != "step"}


def same(run: RunData) -> None:
    """Asserts that the run has the 20 rows, to the digits that a 32-bit float keeps."""
    names = {name for row in ROWS for name in row} - {"step"}
    assert names <= set(run.series)
    for name in names:
        found, expected = run.series[name], [(row["step"], row[name]) for row in ROWS if name in row]
        assert found.steps.tolist() == [step for step, _ in expected]
        assert np.allclose(found.values, [value for _, value in expected], rtol=1e-6)


def write_json(path: Path, data: Any) -> Path:
    path.write_text(json.dumps(data))
    return path


def write_csv(path: Path, listed: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in listed for key in row)))
        writer.writeheader()
        writer.writerows(listed)
    return path


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., LoadedRecipe]:
    def load(*overrides: str) -> LoadedRecipe:
        path = tmp_path / "small.yaml"
        path.write_text(RECIPE)
        return load_recipe(path, [f"logger.log_dir={tmp_path / 'run'}", *overrides], check=False)

    return load


def test_a_run_directory_and_its_offline_wandb_files_give_the_same_20_steps(
    load: Callable[..., LoadedRecipe], tmp_path: Path
) -> None:
    loaded = load("logger.wandb_enabled=true", "logger.wandb.mode=offline", "grpo.max_num_steps=20")
    tracker = Tracker(RunDirectory.open(loaded, resume=False), loaded, stream=io.StringIO())
    tracker.start_backends()
    for row in ROWS:
        tracker.log(int(row["step"]), {name: value for name, value in row.items() if name != "step"})
    tracker.log(3, {"train/extra": math.inf})
    tracker.close(0, "done")
    (file,) = (tmp_path / "run/wandb").glob("offline-run-*/*.wandb")
    finished_records(file)
    found = [read_run(tmp_path / "run"), read_run(tmp_path / "run/wandb"), read_run(file)]
    for run in found:
        same(run)
        assert run.series["train/extra"].steps.tolist() == [3] and math.isnan(run.series["train/extra"].values[0])
        assert run.config is not None and run.config["grpo"]["num_prompts_per_step"] == 4
        assert (run.ending.state, run.ending.planned_steps) == ("done", 20)
    assert found[0].environment is not None and found[0].environment["devices.kind"] == "cpu"
    assert [run.source for run in found] == ["run directory", "W&B offline run", "W&B offline run"]


def test_an_offline_file_cut_in_the_middle_of_a_record_gives_the_rows_before_it(
    load: Callable[..., LoadedRecipe], tmp_path: Path
) -> None:
    loaded = load("logger.wandb_enabled=true", "logger.wandb.mode=offline")
    tracker = Tracker(RunDirectory.open(loaded, resume=False), loaded, stream=io.StringIO())
    tracker.start_backends()
    for step in range(1, 4):
        tracker.log(step, {"train/reward": 0.5})
    tracker.close(0, "done")
    (file,) = (tmp_path / "run/wandb").glob("offline-run-*/*.wandb")
    finished_records(file)
    whole, cut, found = file.read_bytes(), tmp_path / "cut.wandb", set()
    for end in range(whole.index(b"train/reward") + 400, len(whole) - 1, 13):
        cut.write_bytes(whole[:end])
        rows_of = [dict(items(r.history.item)) for r in records(cut) if r.WhichOneof("record_type") == "history"]
        found.add(tuple(row["step"] for row in rows_of))
    assert {(1,), (1, 2), (1, 2, 3)} <= found <= {(), (1,), (1, 2), (1, 2, 3)}
    # The exit record comes last: without it nobody knows how the run ended.
    assert read_run(cut).ending.state == "unknown"
    at = whole.index(b"0.5", whole.index(b"train/reward"))
    cut.write_bytes(whole[:at] + b"9" + whole[at + 1 :])
    with pytest.raises(UserError, match="checksum of a record is wrong"):
        read_run(cut)


def test_nemo_rls_tensorboard_dump_gives_the_same_20_steps_under_our_names(tmp_path: Path) -> None:
    dump: dict[str, dict[str, float]] = {}
    for row in ROWS:
        for name, value in nemo_rl(row).items():
            dump.setdefault(name, {})[str(row["step"])] = value
    dump["ray/node.0.gpu.0.mem_gb"] = {"10": 61.5, "20": 70.25}
    dump["ray/node.1.gpu.3.mem_gb"] = {"10": 71.5, "20": 64.0}
    run = read_run(write_json(tmp_path / "metrics.json", dump))
    same(run)
    assert run.source == "NeMo-RL TensorBoard dump" and run.config is None
    assert run.series["policy/memory_peak_gib"].values.tolist() == [71.5]


@pytest.mark.parametrize("form", ["list", "lines", "pandas"])
def test_a_wandb_history_as_json_gives_the_same_20_steps(tmp_path: Path, form: str) -> None:
    history = [{"_step": row["step"], "_runtime": 3.5, **nemo_rl(row)} for row in ROWS]
    history.append({"_step": 21, "_runtime": 4.0, "system/gpu.0.memory": 11.0})
    if form == "list":
        path = write_json(tmp_path / "history.json", history)
    elif form == "lines":
        path = tmp_path / "history.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in history))
    else:
        names = dict.fromkeys(key for row in history for key in row)
        table = {name: {str(i): row.get(name) for i, row in enumerate(history)} for name in names}
        path = write_json(tmp_path / "history.json", table)
    run = read_run(path)
    same(run)
    assert "_runtime" not in run.series


def test_a_wandb_history_as_csv_gives_the_same_20_steps(tmp_path: Path) -> None:
    same(read_run(write_csv(tmp_path / "h.csv", [{"_step": row["step"], **nemo_rl(row)} for row in ROWS])))


def test_our_own_wandb_runs_go_by_their_logged_step_and_not_by_wandbs_count_of_rows(tmp_path: Path) -> None:
    history = [{"_step": number, **row} for number, row in enumerate(ROWS)]
    same(read_run(write_csv(tmp_path / "h.csv", history)))


def test_a_charts_csv_export_is_one_metric_of_one_run(tmp_path: Path) -> None:
    path = tmp_path / "chart.csv"
    path.write_text(
        '"Step","a - b - train/reward","a - b - train/reward__MIN","a - b - train/reward__MAX"\n'
        '"1","0.25","0.25","0.25"\n"2","NaN","NaN","NaN"\n'
    )
    run = read_run(path)
    assert set(run.series) == {"train/reward"}
    assert run.series["train/reward"].steps.tolist() == [1, 2]
    assert math.isnan(run.series["train/reward"].values[1])
    path.write_text('"Step","a - train/reward","b - train/reward"\n1,0.1,0.2\n')
    with pytest.raises(UserError, match="holds the runs a, b"):
        read_run(path)


def test_an_empty_cell_is_no_value_and_a_written_nan_is_one_that_was_not_finite(tmp_path: Path) -> None:
    run = read_run(
        write_json(
            tmp_path / "h.json",
            [
                {"_step": 1, "train/loss": "NaN", "train/reward": 1.0},
                {"_step": 2, "train/loss": None, "train/reward": 1},
            ],
        )
    )
    assert run.series["train/loss"].steps.tolist() == [1] and math.isnan(run.series["train/loss"].values[0])


def test_a_configuration_is_found_beside_its_history_and_never_another_runs(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_json(tmp_path / f"{name}.json", [{"_step": 1, "train/reward": 0.5}])
    (tmp_path / "a.config.yaml").write_text(yaml.safe_dump(config(0)))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config(1)))
    assert read_run(tmp_path / "a.json").config == config(0)
    assert read_run(tmp_path / "b.json").config is None
    folder = tmp_path / "alone"
    folder.mkdir()
    write_json(folder / "history.json", [{"_step": 1, "train/reward": 0.5}])
    wrapped = {key: {"desc": None, "value": value} for key, value in config(1).items()} | {"wandb_version": 1}
    (folder / "config.yaml").write_text(yaml.safe_dump(wrapped))
    assert read_run(folder).config == config(1)


def test_of_two_rows_for_a_step_the_later_counts_as_in_a_resumed_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": step, "train/reward": value}) + "\n" for step, value in ((1, 1.0), (2, 2.0), (1, 3.0))
        )
    )
    assert read_run(tmp_path).series["train/reward"].values.tolist() == [3.0, 2.0]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "not JSON"),
        ("a.json", '{"train/loss": 1.0}', "JSON of no known form"),
        ("a.json", '[{"train/loss": 1.0}]', "no step column, expected one of step, _step"),
        ("a.json", "[1]", "row 1: expected an object"),
        ("a.json", '{"train/loss": {"1": "high"}}', "train/loss at step 1: expected a number, got 'high'"),
        ("a.csv", "_step,train/loss\n1\n", "a.csv:2: expected 2 cells"),
        ("a.csv", "_step,train/loss\n1.5,2\n", "_step 1.5 is not a whole number"),
        ("a.csv", "", "holds no row of metrics"),
        ("a.csv", "a,b\n1,2\n", "no step column"),
        ("a.txt", "", "expected a run directory"),
        ("a.wandb", "no log", "not a W&B log"),
    ],
)
def test_a_broken_file_is_a_user_error_that_names_it(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message) as error:
        read_run(tmp_path / name)
    assert str(tmp_path / name) in str(error.value)


def test_both_paths_that_cannot_be_read_are_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError) as error:
        read_runs([tmp_path / "missing", tmp_path / "empty"])
    first, second = str(error.value).splitlines()
    assert "missing: no such file or folder" in first and "empty: holds nothing known" in second


def test_runs_of_the_same_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    assert distinct_names([tmp_path / "a/run", tmp_path / "b/run"]) == ["a/run", "b/run"]
    assert distinct_names([tmp_path / "a/x", tmp_path / "a/y"]) == ["x", "y"]
    assert distinct_names([tmp_path / "a/x", tmp_path / "a/x"]) == ["x", "x"]
