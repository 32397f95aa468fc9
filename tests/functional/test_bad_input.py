"""Risk guarded: a user's mistake costs minutes, shows a traceback, or leaves something half-written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.functional.cli import MODEL, TINY, here, run_recipe
from tests.shared_ray import ensure_ray

CHILD = """\
defaults: {parent}
policy:
  model_name: {model}
data:
  _override_: true
  max_input_seq_length: {limit}
  train: {{dataset_name: jsonl, path: {rows}, env_name: {env}}}
env:
  _override_: true
  math: {{verifier: {verifier}, num_workers: 1}}
"""


def write_recipe(
    folder: Path,
    *,
    rows: str,
    limit: int = 48,
    env: str = "math",
    verifier: str = "math_verify",
    model: Path = MODEL,
) -> Path:
    (folder / "rows.jsonl").write_text(rows)
    text = CHILD.format(
        parent=TINY,
        model=model,
        run=folder / "run",
        limit=limit,
        rows=folder / "rows.jsonl",
        env=env,
        verifier=verifier,
    )
    (folder / "bad.yaml").write_text(text)
    return folder / "bad.yaml"


def row(problem: str = "What is 1 + 2?", answer: str = "3") -> str:
    return json.dumps({"problem": problem, "answer": answer}) + "\n"


GOOD = row() * 16
GPUS = ("cluster.device=cuda", "cluster.gpus_per_node=8", "policy.sequence_packing.share_prompts=false")


def refused(recipe: Path, *expected: str, overrides: Sequence[str] = ()) -> None:
    """Exit 2, every expected part in the message, no traceback, nothing written."""
    outcome = here("run", recipe, "logger.log_dir=run", *overrides, cwd=recipe.parent)
    assert outcome.code == 2, outcome.text
    assert [part for part in expected if part not in outcome.stderr] == [], outcome.stderr
    assert "Traceback" not in outcome.text
    assert not (recipe.parent / "run").exists()


def test_a_missing_model_names_the_folder(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, rows=GOOD, model=tmp_path / "no-such-model")
    refused(recipe, "policy.model_name", "no-such-model")


def model_without(tmp_path: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of the tiny model with some tensors changed."""
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors")
    return model


def test_a_model_without_one_of_its_tensors_names_it(tmp_path: Path) -> None:
    model = model_without(tmp_path, lambda tensors: tensors.pop("model.norm.weight"))
    refused(write_recipe(tmp_path, rows=GOOD, model=model), str(model), "1 tensors missing: model.norm.weight")


def test_weights_that_contradict_the_config_are_named_with_both_shapes(tmp_path: Path) -> None:
    model = model_without(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}))
    refused(write_recipe(tmp_path, rows=GOOD, model=model), str(model), "model.norm.weight is [3], expected [64]")


def test_a_weights_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    model = model_without(tmp_path, lambda tensors: None)
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused(write_recipe(tmp_path, rows=GOOD, model=model), str(file), "cut off")


def test_a_broken_row_is_named_with_file_and_line_17(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, rows=GOOD + '{"problem": "2 + 2", "answer"\n')
    refused(recipe, "rows.jsonl:17", "JSON")


def test_a_row_without_an_answer_is_named_with_file_and_line_17(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, rows=GOOD + '{"problem": "2 + 2"}\n')
    refused(recipe, "rows.jsonl:17", "answer")


def test_an_unknown_environment_names_the_known_ones(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, rows=GOOD, env="meth")
    refused(recipe, "meth", "math")


def test_an_empty_dataset_is_refused(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, rows="")
    refused(recipe, "rows.jsonl")


def test_a_dataset_of_3_rows_does_not_fill_a_step_of_16(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, rows=row() * 3)
    refused(recipe, "3", "16")


def test_a_prompt_longer_than_the_limit_is_named_with_both_lengths(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, rows=GOOD + row("1 + " * 60), limit=30)
    refused(recipe, "rows.jsonl:17", "30")


def test_a_verifier_that_cannot_be_imported_is_refused_before_anything_starts(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, rows=GOOD, verifier="no_such_package.verifier:verify")
    refused(recipe, "no_such_package")


def test_a_misspelled_key_gets_file_line_and_the_near_match(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, rows=GOOD)
    recipe.write_text(recipe.read_text() + "grpo:\n  num_prompt_per_step: 8\n")
    line = recipe.read_text().splitlines().index("  num_prompt_per_step: 8") + 1
    refused(recipe, f"bad.yaml:{line}", "grpo.num_prompt_per_step", "num_prompts_per_step")


def test_a_recipe_for_8_gpus_on_a_host_without_any_says_needed_and_found(tmp_path: Path) -> None:
    ensure_ray()
    recipe = write_recipe(tmp_path, rows=GOOD)
    refused(recipe, "needs 1 node(s) with 8 GPU each", "found 1 node(s)", overrides=GPUS)


def test_a_verifier_that_returns_2_values_ends_the_run_naming_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_verifier.py").write_text("def verify(response, metadata):\n    return [1.0, 0.0]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = write_recipe(tmp_path, rows=GOOD, verifier="own_verifier:verify")
    outcome = run_recipe(recipe, tmp_path / "run", "grpo.max_num_steps=1", cwd=tmp_path)
    assert outcome.code == 2, outcome.text
    assert "own_verifier:verify" in outcome.stderr
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["exit_code"] == 2
    assert "own_verifier:verify" in manifest["reason"]
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""
    assert "Traceback" not in outcome.text
