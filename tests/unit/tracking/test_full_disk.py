"""Risk guarded: a disk that fills up hides why a run ended. `/dev/full` is the kernel's own full disk."""

from __future__ import annotations

import errno
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_moe.disk import CannotWrite, is_full, writing
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.load import LoadedRecipe
from nemo_rl_moe.tracking.metrics_log import MetricsLog
from nemo_rl_moe.tracking.run_dir import RunDirectory
from nemo_rl_moe.tracking.tracker import Tracker

Load = Callable[..., LoadedRecipe]


def full(path: Path) -> Path:
    path.symlink_to("/dev/full")
    return path


def test_a_row_that_a_full_disk_does_not_take_names_metrics_jsonl_and_closing_says_nothing_more(tmp_path: Path) -> None:
    log = MetricsLog(full(tmp_path / "metrics.jsonl"))
    with pytest.raises(CannotWrite, match=r"cannot write .*metrics\.jsonl: No space left on device \(.* free of .*\)"):
        log.log(1, {"train/loss": 0.5})
    log.close()


def test_a_manifest_that_cannot_be_written_at_the_end_is_the_error_of_a_run_that_was_done(load: Load) -> None:
    loaded = load()
    directory = RunDirectory.open(loaded, resume=False)
    tracker = Tracker(directory, loaded, stream=io.StringIO())
    full(directory.path / ".manifest.json.partial")
    with pytest.raises(CannotWrite, match=r"manifest\.json: No space left"):
        tracker.close(0, "done")
    assert json.loads((directory.path / "manifest.json").read_text())["exit_code"] is None


def test_a_manifest_that_cannot_be_written_is_a_warning_where_another_error_ends_the_run(load: Load) -> None:
    loaded, screen = load(), io.StringIO()
    directory = RunDirectory.open(loaded, resume=False)
    tracker = Tracker(directory, loaded, stream=screen)
    full(directory.path / ".manifest.json.partial")
    tracker.close(1, "WorkerDied: policy rank 0")
    assert "warning: cannot write" in screen.getvalue()
    assert "WorkerDied: policy rank 0" in (directory.path / "run.log").read_text()


def test_a_directory_whose_first_files_do_not_fit_is_refused_and_not_left_behind(load: Load, tmp_path: Path) -> None:
    loaded = load()
    (tmp_path / "run").mkdir()
    full(tmp_path / "run/.config.yaml.partial")
    with pytest.raises(UserError, match=r"logger\.log_dir: cannot write to .*run \(No space left on device\)"):
        RunDirectory.open(loaded, resume=False)
    assert not (tmp_path / "run").exists()


def test_other_errors_keep_their_reason_and_say_nothing_of_space(tmp_path: Path) -> None:
    with pytest.raises(CannotWrite) as caught, writing(tmp_path / "x"):
        raise OSError(errno.EROFS, "Read-only file system")
    assert str(caught.value) == f"cannot write {tmp_path / 'x'}: Read-only file system"
    assert not is_full(tmp_path / "not/there/yet")
