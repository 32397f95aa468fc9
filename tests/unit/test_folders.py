"""Risk guarded: a process is killed while it removes or replaces a folder, and half of it stays under its name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from nemo_rl_moe import folders


def folder_of(path: Path, text: str) -> Path:
    path.mkdir()
    for name in ("a", "b", "c"):
        (path / name).write_text(text)
    return path


def die_while_removing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removing a folder ends the process after the first file."""

    def remove_one_file(path: Path, ignore_errors: bool = False) -> None:
        for file in sorted(Path(path).glob("*"))[:1]:
            file.unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", remove_one_file)


def test_a_removal_cut_off_after_1_of_3_files_leaves_nothing_under_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path / "step_5", "old")
    with monkeypatch.context() as patched:
        die_while_removing(patched)
        with pytest.raises(KeyboardInterrupt):
            folders.remove(folder)
    assert not folder.exists()
    folders.remove_leftovers(tmp_path, "step_*")
    assert list(tmp_path.iterdir()) == []


def test_a_replacement_cut_off_while_it_removes_the_old_folder_has_put_the_new_one_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = folder_of(tmp_path / "step_5", "old"), folder_of(tmp_path / "tmp_step_5", "new")
    with monkeypatch.context() as patched:
        die_while_removing(patched)
        with pytest.raises(KeyboardInterrupt):
            folders.put_in_place(new, old)
    assert [(old / name).read_text() for name in ("a", "b", "c")] == ["new"] * 3
    # The leftover of the cut-off removal is in nobody's way.
    folders.put_in_place(folder_of(tmp_path / "tmp_step_5", "newer"), old)
    assert [path.name for path in tmp_path.iterdir()] == ["step_5"]
    assert (old / "a").read_text() == "newer"
