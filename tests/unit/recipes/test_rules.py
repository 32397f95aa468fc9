"""Mutation test: each rule is broken once in a valid recipe; exactly that problem is reported, at the line that broke it.

Risk: a rule that never fires, one that fires for a neighbour's mistake, one that points at the wrong line.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from nemo_rl_moe.recipe.load import load_recipe
from nemo_rl_moe.recipe.rules import RULES
from nemo_rl_moe.recipe.scoring import environment_name
from tests.unit.recipes.mutations import MUTATIONS, VALID
from tests.unit.recipes.mutations.base import ASYNC, SYNC, write_tiny_model, written
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
    if mutation.severity == "error":
        found = problems_of(path)
    else:
        known = {(p.rule, p.message) for p in load_recipe(mutation.base).warnings}
        found = [p for p in load_recipe(path).warnings if (p.rule, p.message) not in known]
    assert [(p.rule, p.path) for p in found] == [(mutation.rule, mutation.path)], [str(p) for p in found]
    assert mutation.message in found[0].message
    if any(key.startswith(mutation.path) for key in mutation.keys):
        assert (Path(found[0].source.file).name, found[0].source.line) == (path.name, line)


def test_every_rule_is_broken_by_a_mutation():
    assert {rule.name for rule in RULES} - {m.rule for m in MUTATIONS} == {"file name"}


FILE_NAMES = [
    ("grpo-x-8n4g", {}, "cluster.num_nodes", "4, but the file name says 8"),
    ("grpo-x-4n8g", {}, "cluster.gpus_per_node", "4, but the file name says 8"),
    ("grpo-x-4n4g-async-1off", {}, "grpo.async_grpo.enabled", "false, but the file name says async"),
    (
        "grpo-x-4n4g-mxfp8-rollout",
        {},
        "policy.generation.vllm_cfg.is_mx",
        "false, but the file name says mxfp8-rollout",
    ),
]


@pytest.mark.parametrize(("stem", "keys", "path", "message"), FILE_NAMES)
def test_file_name_that_says_something_else_is_the_only_problem(tmp_path, stem, keys, path, message):
    file = tmp_path / f"{stem}.yaml"
    file.write_text(yaml.safe_dump({"defaults": str(SYNC), **keys}))
    assert [(p.rule, p.path, p.message) for p in problems_of(file)] == [("file name", path, message)]


def test_file_name_with_another_age_is_a_problem(tmp_path):
    file = tmp_path / "grpo-x-4n4g-async-8off.yaml"
    file.write_text(yaml.safe_dump({"defaults": str(ASYNC)}))
    assert [str(p).split(": ", 1)[1] for p in problems_of(file)] == [
        "grpo.async_grpo.max_trajectory_age_steps: 1, but the file name says 8"
    ]


def test_the_only_environment_needs_no_name_and_ranks_checkpoints_by_its_own_accuracy():
    overrides = ["data.default.env_name=null", "checkpointing.enabled=true", "checkpointing.save_period=20"]
    recipe = load_recipe(TINY, [*overrides, "checkpointing.metric_name=validation/accuracy/arithmetic"]).recipe
    assert [environment_name(recipe, dataset) for dataset in (recipe.data.train, recipe.data.validation)] == [
        "arithmetic",
        "arithmetic",
    ]


def test_directory_from_the_command_line_is_the_users_own():
    assert load_recipe(TINY, ["logger.log_dir=/tmp/anything"]).recipe.logger.log_dir == "/tmp/anything"


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
