"""Risk guarded: set-up with a Python that the pinned libraries do not run on ends in a page of pip's errors."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("version", ["3.10", "3.13", "3.14"])
def test_an_unsupported_python_is_refused_in_one_line_that_names_3_11_and_3_12(tmp_path: Path, version: str) -> None:
    fake = tmp_path / "python-of-another-version"
    fake.write_text(f"#!/bin/sh\necho {version}\n")
    fake.chmod(0o755)
    command = [REPOSITORY / "tools/setup_env.sh", fake, tmp_path / "venv"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"is Python {version}" in line and "3.11 (default) and 3.12" in line
    assert not (tmp_path / "venv").exists()


def test_make_takes_python_3_11_where_there_is_one_and_python3_elsewhere(tmp_path: Path) -> None:
    """make prints its choice, with a PATH that has just what it needs."""
    for name in ("sh", "make", "echo"):
        (tmp_path / name).symlink_to(shutil.which(name) or pytest.skip(f"no {name}"))
    fake = tmp_path / "python3"
    fake.write_text("#!/bin/sh\necho 3.12\n")
    fake.chmod(0o755)

    def chosen() -> str:
        command = ["make", "-s", "-f", REPOSITORY / "Makefile", "--eval", "chosen: ; @echo $(PYTHON)", "chosen"]
        return subprocess.check_output(command, env={"PATH": str(tmp_path)}, text=True, cwd=REPOSITORY).strip()

    assert chosen() == "python3"
    (tmp_path / "python3.11").symlink_to(fake)
    assert chosen() == "python3.11"
