"""Risk guarded: a commit takes along what belongs to one machine, and a fresh clone does not run."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
MADE_HERE = (".venv", ".venv-3.12", "models", "runs", ".build", "wandb")


def git(*arguments: str) -> list[str]:
    if shutil.which("git") is None or not (REPOSITORY / ".git").exists():
        pytest.skip("not a git checkout")
    done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_no_link_is_tracked() -> None:
    assert [entry for entry in git("ls-files", "--stage") if entry.startswith("120000")] == []


def test_what_set_up_and_runs_make_is_ignored_as_a_folder_and_as_a_link(tmp_path: Path) -> None:
    """A pattern that ends in a slash matches folders only, and a link to one would be committed."""
    shutil.copy(REPOSITORY / ".gitignore", tmp_path)
    for name in MADE_HERE:
        (tmp_path / name).symlink_to(tmp_path)
    git("init", "--quiet", str(tmp_path))
    done = git("-C", str(tmp_path), "status", "--porcelain", "--untracked-files=all")
    assert done == ["?? .gitignore"]


def test_every_file_of_the_package_that_is_no_module_is_installed_with_it() -> None:
    """A folder that is missing from the wheel is seen by nobody who works in the repository."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["nemo_rl_moe"]
    files = [name.partition("/")[2] for name in git("ls-files", "nemo_rl_moe") if not name.endswith(".py")]
    assert files and [file for file in files if not any(fnmatchcase(file, each) for each in patterns)] == []
