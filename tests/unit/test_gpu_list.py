"""`make test-gpu` on a machine without a GPU: says which tests there are and what each needs, and is no failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def run_gpu_tests(*paths: str) -> subprocess.CompletedProcess[str]:
    """As the Makefile does, with all devices hidden."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "-rs", "-p", "no:cacheprovider", *paths],
        cwd=REPOSITORY,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_every_gpu_test_is_listed_with_its_reason_and_the_exit_code_is_0() -> None:
    done = run_gpu_tests("tests/gpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests/gpu/test_sleep.py" in done.stdout
    assert "needs 1 CUDA device(s), found 0: vLLM's CPU worker has no memory that it could give back" in done.stdout
    assert "failed" not in done.stdout


def test_a_gpu_test_without_a_reason_is_refused(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((REPOSITORY / "tests/conftest.py").read_text())
    (tmp_path / "test_it.py").write_text("import pytest\n\n@pytest.mark.gpu\ndef test_it():\n    pass\n")
    done = run_gpu_tests(str(tmp_path))
    assert done.returncode != 0
    assert "the gpu marker needs a reason" in done.stdout + done.stderr
