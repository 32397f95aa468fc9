"""Risk guarded: retention removes the checkpoint that should have stayed, or leaves half of one that looks whole."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl_moe.loops import checkpointing
from nemo_rl_moe.recipe.schema.run import CheckpointingConfig


def run_with(root: Path, **settings: Any) -> Any:
    config = CheckpointingConfig(enabled=True, checkpoint_dir=str(root), **settings)
    return SimpleNamespace(recipe=SimpleNamespace(checkpointing=config), run_dir=root)


def checkpoint(root: Path, step: int, **metrics: float) -> None:
    (root / f"step_{step}").mkdir()
    (root / f"step_{step}/training_state.json").write_text(json.dumps({"step": step, "metrics": metrics}))
    (root / f"step_{step}/weights").write_text("w")


def kept(root: Path) -> list[int]:
    return [step for step, _ in checkpointing.complete_checkpoints(root)]


@pytest.mark.parametrize(("higher", "expected"), [(True, [2, 5]), (False, [3, 5])])
def test_of_5_checkpoints_the_best_one_and_the_newest_stay(tmp_path: Path, higher: bool, expected: list[int]) -> None:
    for step, reward in ((1, 0.5), (2, 0.9), (3, 0.1), (4, math.nan)):
        checkpoint(tmp_path, step, **{"train/reward": reward})
    checkpoint(tmp_path, 5)
    run = run_with(tmp_path, keep_top_k=1, metric_name="train/reward", higher_is_better=higher)
    checkpointing._retain(run)
    assert kept(tmp_path) == expected


def test_a_run_killed_while_retention_removes_step_1_shows_no_torn_step_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        checkpoint(tmp_path, step)

    def remove_weights_and_die(path: Path, ignore_errors: bool = False) -> None:
        if Path(path).exists():
            (Path(path) / "weights").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", remove_weights_and_die)
        with pytest.raises(KeyboardInterrupt):
            checkpointing._retain(run_with(tmp_path, keep_top_k=2))
    assert kept(tmp_path) == [2, 3]
    assert all((folder / "weights").exists() for folder in tmp_path.glob("step_*"))
