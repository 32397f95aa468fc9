"""Risk guarded: a checkpoint that does not fit fills the disk with its half, and nobody hears that it was the disk."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl_moe.disk import CannotWrite
from nemo_rl_moe.loops import checkpointing
from tests.unit.loops.test_retention import checkpoint, kept, run_with


class FakePolicy:
    """Writes one file, then fails as Megatron does on a full disk."""

    def save(self, folder: str) -> None:
        Path(folder).mkdir()
        (Path(folder) / "part").write_text("half")
        raise RuntimeError("unexpected pos 704 vs 598")


def run_that_cannot_save(root: Path) -> Any:
    run = run_with(root)
    run.policy = FakePolicy()
    return run


def test_a_full_disk_is_named_with_the_newest_complete_checkpoint_and_keeps_no_half_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(tmp_path, 2)
    (tmp_path / "tmp_step_1").mkdir()  # of a process that was killed
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=3 << 20, used=3 << 20, free=0))
    with pytest.raises(CannotWrite) as caught:
        checkpointing.save(run_that_cannot_save(tmp_path), 4, {})
    expected = (
        f"checkpoint of step 4: the disk is full (0 B free of 3.0 MiB); the newest complete one is {tmp_path}/step_2"
    )
    assert str(caught.value) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]


def test_another_failure_stays_what_it_is_and_keeps_no_half_checkpoint_either(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="unexpected pos"):
        checkpointing.save(run_that_cannot_save(tmp_path), 4, {})
    assert kept(tmp_path) == [] and list(tmp_path.iterdir()) == []


def test_a_checkpoint_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CannotWrite, match=r"checkpoint of step 4: cannot write .*file/tmp_step_4: Not a directory"):
        checkpointing.save(run_that_cannot_save(tmp_path / "file"), 4, {})
