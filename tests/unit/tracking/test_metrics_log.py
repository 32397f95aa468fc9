"""metrics.jsonl: no row lost, none torn, always JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from nemo_rl_moe.errors import UserError
from nemo_rl_moe.tracking.metrics_log import MetricsLog, by_step, read_rows


def test_a_validation_of_step_5_logged_after_training_step_6_is_kept_with_its_step(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.log(5, {"train/loss": 0.5})
    log.log(6, {"train/loss": 0.25})
    log.log(5, {"validation/accuracy": 0.75})
    log.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [
        {"step": 5, "train/loss": 0.5},
        {"step": 6, "train/loss": 0.25},
        {"step": 5, "validation/accuracy": 0.75},
    ]
    assert by_step(rows) == {5: {"train/loss": 0.5, "validation/accuracy": 0.75}, 6: {"train/loss": 0.25}}


def test_nan_and_infinity_become_null_and_are_named_so_that_the_line_is_json(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.log(1, {"train/loss": math.nan, "train/grad_norm": math.inf, "train/reward": 1})
    log.close()
    text = (tmp_path / "metrics.jsonl").read_text()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    row = json.loads(text, parse_constant=refuse)
    assert row == {
        "step": 1,
        "train/loss": None,
        "train/grad_norm": None,
        "train/reward": 1.0,
        "nonfinite": ["train/loss", "train/grad_norm"],
    }
    assert math.isnan(by_step([row])[1]["train/loss"])


def test_each_line_is_on_disk_before_the_next_is_logged(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        log.log(step, {"x": step})
        assert len(read_rows(tmp_path / "metrics.jsonl")) == step
    log.close()


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_last_line_torn_by_a_kill_is_dropped_and_the_two_before_it_stay(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = '{"step": 1, "x": 1.0}\n{"step": 2, "x": 2.0}\n'
    path.write_text(whole + '{"step": 3, "x": 3.0}'[:cut])
    assert [row["step"] for row in read_rows(path)] == [1, 2]
    log = MetricsLog(path)
    log.log(3, {"x": 4.0})
    log.close()
    assert path.read_text() == whole + '{"step": 3, "x": 4.0}\n'


def test_a_last_line_that_lacks_only_its_line_break_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "x": 1.0}')
    log = MetricsLog(path)
    log.log(2, {"x": 2.0})
    log.close()
    assert [row["x"] for row in read_rows(path)] == [1.0, 2.0]


def test_reopening_appends_and_the_repeated_step_2_counts_with_its_later_value(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for values in ([(1, 1.0), (2, 2.0)], [(2, 20.0), (3, 30.0)]):
        log = MetricsLog(path)
        for step, value in values:
            log.log(step, {"x": value})
        log.close()
    assert len(read_rows(path)) == 4
    assert by_step(read_rows(path)) == {1: {"x": 1.0}, 2: {"x": 20.0}, 3: {"x": 30.0}}


def test_numpy_numbers_are_logged_and_a_text_is_refused_by_name(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.log(1, {"a": np.float32(0.5), "b": np.int64(3)})
    with pytest.raises(TypeError, match="metric c: expected a number, got 'high'"):
        log.log(2, {"a": 1.0, "c": "high"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="step must be 0 or more, got -1"):
        log.log(-1, {})
    log.close()
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 1, "a": 0.5, "b": 3.0}]


def test_a_broken_line_2_is_an_error_that_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": oops}\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: not JSON"):
        read_rows(path)
    path.write_text('{"loss": 1}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:1: expected an object with an integer `step`"):
        read_rows(path)
