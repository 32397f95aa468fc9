"""Risk guarded: a run that was cut off goes on as another run, or its checkpoints cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_rl_moe.loops import checkpointing
from nemo_rl_moe.loops.checkpointing import complete_checkpoints
from nemo_rl_moe.loops.components import Run
from tests.functional.cli import TINY, metrics, run_recipe

JSONL = """\
defaults: {parent}
data:
  _override_: true
  max_input_seq_length: 48
  train: {{dataset_name: jsonl, path: rows.jsonl, env_name: math}}
  validation: {{dataset_name: jsonl, path: rows.jsonl, env_name: math, size: 3}}
env:
  _override_: true
  math: {{verifier: math_verify, num_workers: 1}}
grpo: {{num_prompts_per_step: 4, num_generations_per_prompt: 4, max_num_epochs: 4, val_period: 2, val_batch_size: 2}}
checkpointing: {{enabled: true, save_period: 2, keep_top_k: 2}}
"""


def interrupt_after_the_save_of(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends when the checkpoint of that step has its name and the step's metrics are not written yet."""
    save = checkpointing.save

    def save_and_end(run: Run, saved: int, metrics: dict[str, float]) -> Path:
        folder = save(run, saved, metrics)
        if saved == step:
            raise KeyboardInterrupt
        return folder

    monkeypatch.setattr(checkpointing, "save", save_and_end)


def test_4_steps_cut_off_after_the_checkpoint_of_2_equal_4_in_one_go_on_jsonl_rows_graded_by_math_verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"problem": f"What is {a} + {a}?", "answer": str(2 * a)} for a in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "sums.yaml"
    recipe.write_text(JSONL.format(parent=TINY))
    for folder, expected_code, *arguments in (("whole", 0), ("parts", 130), ("parts", 0, "--resume")):
        with monkeypatch.context() as patched:
            if expected_code == 130:
                interrupt_after_the_save_of(2, patched)
            outcome = run_recipe(recipe, tmp_path / folder, "grpo.max_num_steps=4", *arguments, cwd=tmp_path)
        assert outcome.code == expected_code, outcome.text
    whole, parts = metrics(tmp_path / "whole"), metrics(tmp_path / "parts")
    # No row is lost and none comes twice; only the time of the save itself was not known any more.
    assert [row["step"] for row in parts] == [row["step"] for row in whole] == [1, 2, 3, 4]
    assert [set(a) - set(b) for a, b in zip(whole, parts, strict=True)] == [
        set(),
        {"timing/train/checkpointing"},
        set(),
        set(),
    ]
    for name in ("train/reward", "train/loss", "train/grad_norm", "train/weight_version"):
        assert [row[name] for row in parts] == [row[name] for row in whole], name
    assert [step for step, _ in complete_checkpoints(tmp_path / "parts/checkpoints")] == [2, 4]
    state = json.loads((tmp_path / "parts/checkpoints/step_4/training_state.json").read_text())
    assert state["metrics"]["train/reward"] == parts[3]["train/reward"]
    _exported_model_speaks(tmp_path / "parts/checkpoints/step_4/hf")
    for other in ("step_9", "step_old"):
        (tmp_path / "parts/checkpoints" / other).mkdir()
    assert complete_checkpoints(tmp_path / "parts/checkpoints")[-1][0] == 4


def _exported_model_speaks(folder: Path) -> None:
    """transformers loads the exported folder and its weights are not those the run started from."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer("What is 1 + 2?", return_tensors="pt")["input_ids"]
    assert torch.isfinite(model(ids).logits).all()
    earlier = AutoModelForCausalLM.from_pretrained(folder.parents[1] / "step_2/hf", dtype=torch.float32)
    pairs = zip(model.parameters(), earlier.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs)


def test_a_new_run_refuses_a_checkpoint_folder_of_an_earlier_one(tmp_path: Path) -> None:
    state = tmp_path / "kept/step_5/training_state.json"
    state.parent.mkdir(parents=True)
    state.write_text("{}")
    overrides = ("checkpointing.enabled=true", f"checkpointing.checkpoint_dir={tmp_path / 'kept'}")
    outcome = run_recipe(TINY, tmp_path / "run", *overrides, cwd=tmp_path)
    assert outcome.code == 2, outcome.text
    assert "step_5" in outcome.stderr and "--resume" in outcome.stderr
    assert not (tmp_path / "run").exists()
