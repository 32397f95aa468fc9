"""Risk: a check of recipes that needs torch or Ray, and so cannot run where recipes are reviewed."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]
INSTALLED = ("pytest", "omegaconf", "hydra-core", "pydantic")


def closure(names: tuple[str, ...]) -> set[str]:
    """The distributions and all that they require here."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if distribution.name in found:
            continue
        found.add(distribution.name)
        for requirement in distribution.requires or []:
            if "extra ==" not in requirement:
                waiting.append(re.match(r"[\w.-]+", requirement)[0])
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """A site-packages folder with links to those distributions and nothing else."""
    site = tmp_path_factory.mktemp("site")
    for name in closure(INSTALLED):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            target = site / top
            if not target.exists():
                target.symlink_to(distribution.locate_file(top))
    return site


def run(bare: Path, *arguments: str) -> subprocess.CompletedProcess:
    # -S leaves this interpreter's own packages out; -p no:cacheprovider writes nothing into the tree.
    env = {"PYTHONPATH": f"{bare}{os.pathsep}{REPO}", "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-S", *arguments], cwd=REPO, env=env, capture_output=True, text=True, timeout=240, check=False
    )


def test_torch_and_ray_are_not_there(bare):
    for name in ("torch", "ray", "numpy", "vllm"):
        assert run(bare, "-c", f"import {name}").returncode == 1


def test_hybridep_cases_pass_with_only_pytest_omegaconf_hydra_and_pydantic(bare):
    done = run(bare, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/recipes/test_hybridep_recipes.py")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 102


def test_validate_and_plan_run_with_only_pydantic_and_omegaconf(bare):
    path = "examples/configs/recipes/llm/performance/grpo-qwen3-30ba3b-4n4g.yaml"
    assert "1 recipe(s), 0 with errors" in run(bare, "-m", "nemo_rl_moe", "validate", path).stdout
    assert "16 rank(s)" in run(bare, "-m", "nemo_rl_moe", "plan", path).stdout
