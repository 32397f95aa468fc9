"""Mutation test: each rule is broken in valid recipes; exactly that problem is reported, at the line that broke it.

Risk: a rule that never fires, one that fires for a neighbour's mistake, one that points at the wrong line.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from nemo_rl_moe.recipe.load import load_recipe
from nemo_rl_moe.recipe.rules import RULES
from nemo_rl_moe.recipe.scoring import environment_name
from nemo_rl_moe.recipe.source import Problem
from tests.unit.recipes.mutations import MUTATIONS, VALID
from tests.unit.recipes.mutations.base import Mutation, write_tiny_model, written
from tests.unit.recipes.writing import TINY, problems_of


@pytest.fixture(autouse=True)
def tiny_model(tmp_path_factory, monkeypatch):
    """A model folder with the tiny model's shape, where the recipes look for it."""
    root = tmp_path_factory.mktemp("cwd")
    write_tiny_model(root)
    monkeypatch.chdir(root)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.rule}: {m.path.rsplit('.', 1)[-1]}")
def test_broken_rule_is_the_only_problem_and_has_its_line(tmp_path, mutation):
    path, line = written(tmp_path, mutation)
    found = problems_of(path, *mutation.overrides) if mutation.severity == "error" else new_warnings(path, mutation)
    paths = [mutation.path, *mutation.also]
    assert [(p.rule, p.path) for p in found] == [(mutation.rule, key) for key in paths], [str(p) for p in found]
    assert all(p.severity == mutation.severity for p in found)
    assert mutation.message in found[0].message
    if any(key.startswith(mutation.path) for key in mutation.keys):
        assert (Path(found[0].source.file).name, found[0].source.line) == (path.name, line)


def new_warnings(path: Path, mutation: Mutation) -> list[Problem]:
    """Warnings and notes that the recipe which was changed does not have."""
    known = {(p.rule, p.path) for p in load_recipe(mutation.base).warnings}
    return [p for p in load_recipe(path, mutation.overrides).warnings if (p.rule, p.path) not in known]


@pytest.mark.parametrize("mutation", VALID, ids=lambda m: ", ".join(key.rsplit(".", 1)[-1] for key in m.keys)[:70])
def test_recipe_at_the_edge_of_a_rule_is_valid(tmp_path, mutation):
    assert new_warnings(written(tmp_path, mutation)[0], mutation) == []


def test_every_rule_is_broken_by_a_mutation():
    assert {rule.name for rule in RULES} == {mutation.rule for mutation in MUTATIONS}


def test_the_only_environment_needs_no_name_and_ranks_checkpoints_by_its_own_accuracy():
    overrides = ["data.default.env_name=null", "checkpointing.enabled=true", "checkpointing.save_period=20"]
    recipe = load_recipe(TINY, [*overrides, "checkpointing.metric_name=validation/accuracy/arithmetic"]).recipe
    assert [environment_name(recipe, dataset) for dataset in (recipe.data.train, recipe.data.validation)] == [
        "arithmetic",
        "arithmetic",
    ]


def test_eleven_broken_rules_are_all_reported_at_once(tmp_path):
    file = tmp_path / "many.yaml"
    broken = {
        "policy": {
            "train_global_batch_size": 100,
            "make_sequence_length_divisible_by": 7,
            "generation": {"max_new_tokens": 65},
        },
        "loss_fn": {"sequence_level_importance_ratios": True, "truncated_importance_sampling_type": "tis"},
        "grpo": {
            "skip_reference_policy_logprobs_calculation": True,
            "advantage_clip_low": 1.0,
            "advantage_clip_high": 0.0,
        },
        "data": {"train": {"env_name": "nowhere", "path": "x"}},
        "checkpointing": {"metric_name": "val:accuracy"},
        "cluster": {"gpu_type": "h100"},
    }
    file.write_text(yaml.safe_dump({"defaults": str(TINY)} | broken))
    assert {p.rule for p in problems_of(file)} == {
        "train batch", "divisible length", "sequence length", "sequence ratios", "importance correction", "reference",
        "advantage clip", "environment", "dataset", "checkpoint metric", "GPU type",
    }  # fmt: skip
