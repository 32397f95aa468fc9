"""The tracker on the real W&B and TensorBoard libraries, both read back, and what happens when they fail."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nemo_rl_moe.recipe.load import LoadedRecipe
from nemo_rl_moe.tracking.backends import BestEffort
from nemo_rl_moe.tracking.metrics_log import by_step, read_rows
from nemo_rl_moe.tracking.run_dir import RunDirectory
from nemo_rl_moe.tracking.tracker import Tracker
from tests.unit.tracking.wandb_file import config, history

Load = Callable[..., LoadedRecipe]
OFFLINE = ("logger.wandb_enabled=true", "logger.wandb.mode=offline")
ROWS = [
    (5, {"train/reward": 0.25, "train/loss": 0.5}),
    (6, {"train/reward": 0.5, "train/loss": 0.125}),
    (5, {"validation/accuracy": 0.75, "validation/num_samples": 8.0}),
]


def track(loaded: LoadedRecipe, rows: list, *, resume: bool = False, code: int = 0) -> str:
    """Logs the rows; returns what the console showed."""
    screen = io.StringIO()
    tracker = Tracker(RunDirectory.open(loaded, resume=resume), loaded, stream=screen)
    tracker.start_backends()
    for step, metrics in rows:
        tracker.log(step, metrics)
    tracker.close(code, "done" if code == 0 else "failed")
    return screen.getvalue()


def test_wandb_offline_has_all_3_rows_with_their_steps_the_older_step_last(load: Load, tmp_path: Path) -> None:
    track(load(*OFFLINE), ROWS)
    (file,) = (tmp_path / "run/wandb").glob("offline-run-*/*.wandb")
    assert history(file) == [{"step": step, **metrics} for step, metrics in ROWS]
    shown = config(file)
    assert shown["grpo"]["num_prompts_per_step"] == 4
    assert shown["policy"]["megatron_cfg"]["env_vars"]["HF_TOKEN"] == "<redacted>"
    assert b"hf_secretvalue" not in file.read_bytes()


def test_a_resumed_run_keeps_its_wandb_id(load: Load, tmp_path: Path) -> None:
    track(load(*OFFLINE), ROWS[:1])
    first = json.loads((tmp_path / "run/manifest.json").read_text())["wandb_run_id"]
    track(load(*OFFLINE), ROWS[1:2], resume=True)
    assert json.loads((tmp_path / "run/manifest.json").read_text())["wandb_run_id"] == first
    files = list((tmp_path / "run/wandb").glob(f"offline-run-*/run-{first}.wandb"))
    assert sorted(row["step"] for file in files for row in history(file)) == [5, 6]


def test_wandb_online_without_a_key_warns_once_and_writes_offline_files(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    screen = track(load("logger.wandb_enabled=true"), ROWS)
    assert screen.count("warning: W&B: no API key") == 1
    (file,) = (tmp_path / "run/wandb").glob("offline-run-*/*.wandb")
    assert len(history(file)) == 3


def test_tensorboard_has_every_value_under_its_own_step(load: Load, tmp_path: Path) -> None:
    track(load("logger.tensorboard_enabled=true"), ROWS)
    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/reward")] == [(5, 0.25), (6, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars("validation/accuracy")] == [(5, 0.75)]


def test_a_metric_that_is_not_finite_reaches_tensorboard_as_nan_and_ends_nothing(load: Load, tmp_path: Path) -> None:
    track(load("logger.tensorboard_enabled=true"), [(1, {"train/loss": math.inf}), (2, {"train/loss": 0.5})])
    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    first, second = events.Scalars("train/loss")
    assert math.isnan(first.value) and second.value == 0.5


class FakeBrokenBackend:
    """Raises on every call, as a tracker does whose server is gone."""

    name = "Fake"

    def __init__(self) -> None:
        self.calls = 0

    def log(self, step: int, metrics: object) -> None:
        self.calls += 1
        raise ConnectionError(f"step {step}: server gone")

    def finish(self, exit_code: int) -> None:
        raise ConnectionError("server still gone")


def test_a_backend_that_fails_on_3_rows_and_at_the_end_warns_once_and_is_tried_each_time() -> None:
    warnings: list[str] = []
    broken = FakeBrokenBackend()
    backend = BestEffort("Fake", lambda: broken, warnings.append)
    for step in (1, 2, 3):
        backend.log(step, {"x": 1.0})
    backend.finish(0)
    assert broken.calls == 3
    assert warnings == ["Fake failed to log (ConnectionError: step 1: server gone); metrics.jsonl has everything"]


def test_a_backend_that_cannot_start_is_one_warning_and_then_silence() -> None:
    warnings: list[str] = []

    def start() -> FakeBrokenBackend:
        raise ImportError("No module named 'wandb'")

    backend = BestEffort("W&B", start, warnings.append)
    backend.log(1, {"x": 1.0})
    backend.finish(0)
    assert warnings == ["W&B failed to start (ImportError: No module named 'wandb'); metrics.jsonl has everything"]


def test_a_tensorboard_folder_that_cannot_be_made_leaves_metrics_jsonl_complete(load: Load, tmp_path: Path) -> None:
    loaded = load("logger.tensorboard_enabled=true")
    directory = RunDirectory.open(loaded, resume=False)
    (directory.path / "tensorboard").write_text("in the way")
    screen = io.StringIO()
    tracker = Tracker(directory, loaded, stream=screen)
    tracker.start_backends()
    for step, metrics in ROWS:
        tracker.log(step, metrics)
    tracker.close(0, "done")
    assert screen.getvalue().count("warning: TensorBoard failed to") == 1
    assert by_step(read_rows(tmp_path / "run/metrics.jsonl"))[6] == {"train/reward": 0.5, "train/loss": 0.125}


def test_an_event_is_on_the_console_and_in_run_log_with_its_secret_removed(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    loaded, screen = load(), io.StringIO()
    tracker = Tracker(RunDirectory.open(loaded, resume=False), loaded, stream=screen)
    tracker.start_backends()
    tracker.event("warning: hub refused hf_abcdefgh")
    tracker.close(0, "done")
    for text in (screen.getvalue(), (tmp_path / "run/run.log").read_text()):
        assert "warning: hub refused <redacted>" in text


def test_a_restored_step_gets_the_2_metrics_it_lacks_and_a_complete_one_no_row(load: Load, tmp_path: Path) -> None:
    track(load(), [(1, {"train/loss": 0.5}), (2, {"train/loss": 0.25})])
    tracker = Tracker(RunDirectory.open(load(), resume=True), load(), stream=io.StringIO())
    tracker.start_backends()
    tracker.restore(1, {"train/loss": 9.0})
    tracker.restore(2, {"train/loss": 9.0, "validation/accuracy": 0.75, "validation/num_samples": 8.0})
    tracker.restore(3, {"train/loss": 0.125})
    tracker.close(0, "done")
    rows = read_rows(tmp_path / "run/metrics.jsonl")
    assert rows[2:] == [
        {"step": 2, "validation/accuracy": 0.75, "validation/num_samples": 8.0},
        {"step": 3, "train/loss": 0.125},
    ]


def test_closing_twice_keeps_the_first_exit_code(load: Load, tmp_path: Path) -> None:
    loaded = load()
    tracker = Tracker(RunDirectory.open(loaded, resume=False), loaded, stream=io.StringIO())
    tracker.start_backends()
    tracker.close(130, "interrupted")
    tracker.close(0, "done")
    assert json.loads((tmp_path / "run/manifest.json").read_text())["exit_code"] == 130
