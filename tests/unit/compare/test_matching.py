"""Which differences are meant, which do not matter, and which make a comparison unfair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_rl_moe.compare.matching import FAMILIES, check_treatment, differences, family_of
from nemo_rl_moe.compare.run_data import RunData, Series
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.hybrid_ep import TOPOLOGY_ENV
from nemo_rl_moe.recipe.load import load_recipe
from nemo_rl_moe.recipe.schema_walk import annotation_at
from nemo_rl_moe.recipe.source import split_dotted

RECIPES = Path(__file__).resolve().parents[3] / "examples/configs/recipes/llm"
ENVIRONMENT = {"versions.torch": "2.13.0", "host.name": "a", "code.commit": "abc"}


def run(config: dict[str, Any] | None, environment: dict[str, Any] | None = ENVIRONMENT, name: str = "x") -> RunData:
    series = {"train/reward": Series(np.array([1]), np.array([0.5]))}
    return RunData(name, Path(name), "run directory", series, config, environment)


def kinds(found: list) -> dict[str, str]:
    return {d.key: d.kind for d in found}


def test_one_family_and_logging_is_a_matched_pair() -> None:
    base = {"policy": {"megatron_cfg": {"moe_token_dispatcher_type": "alltoall"}}, "logger": {"log_dir": "a"}}
    other = {"policy": {"megatron_cfg": {"moe_token_dispatcher_type": "allgather"}}, "logger": {"log_dir": "b"}}
    found = differences(run(base), run(other))
    assert (found.verdict, found.why) == ("matched", "differs in dispatcher only (1 key)")
    assert kinds(found.config) == {
        "policy.megatron_cfg.moe_token_dispatcher_type": "treatment",
        "logger.log_dir": "logging",
    }


def test_a_batch_size_that_differs_too_makes_the_pair_not_matched() -> None:
    base = {"policy": {"precision": "float32", "train_global_batch_size": 8}}
    other = {"policy": {"precision": "bfloat16", "train_global_batch_size": 16}}
    found = differences(run(base), run(other))
    assert (found.verdict, found.why) == ("not matched", "also differs in policy.train_global_batch_size")
    assert kinds(found.of_kind("confounder")) == {"policy.train_global_batch_size": "confounder"}


def test_of_two_families_none_is_guessed_and_naming_one_makes_the_other_the_confounder() -> None:
    base = {"policy": {"precision": "float32", "megatron_cfg": {"tensor_model_parallel_size": 1}}}
    other = {"policy": {"precision": "bfloat16", "megatron_cfg": {"tensor_model_parallel_size": 2}}}
    found = differences(run(base), run(other))
    assert found.verdict == "not matched"
    assert found.why == "differs in precision and parallelism; say which is compared with --treatment"
    named = differences(run(base), run(other), ["precision"])
    assert named.why == "also differs in policy.megatron_cfg.tensor_model_parallel_size"
    assert differences(run(base), run(other), ["precision", "parallelism"]).verdict == "matched"


def test_a_key_of_no_family_can_be_named_as_the_treatment() -> None:
    found = differences(run({"grpo": {"seed": 1}}), run({"grpo": {"seed": 2}}), ["grpo.seed"])
    assert (found.verdict, found.why) == ("matched", "differs in grpo.seed only (1 key)")


def test_another_version_of_torch_is_a_confounder_and_another_host_is_not() -> None:
    config = {"grpo": {"seed": 1}}
    other = {**ENVIRONMENT, "versions.torch": "2.11.0", "host.name": "b"}
    found = differences(run(config), run(config, other))
    assert found.verdict == "not matched"
    assert kinds(found.environment) == {"versions.torch": "confounder", "host.name": "logging"}


def test_another_commit_is_a_confounder() -> None:
    found = differences(run({}), run({}, {**ENVIRONMENT, "code.commit": "def"}))
    assert found.why == "differs in code.commit"


def test_a_run_without_configuration_is_not_known_to_be_matched() -> None:
    found = differences(run({"grpo": {"seed": 1}}), run(None, None, "export.csv"))
    assert (found.verdict, found.why) == ("not known to be matched", "no configuration of export.csv")
    assert found.config is None and found.environment is None


def test_equal_runs_are_matched_and_said_to_show_the_spread() -> None:
    found = differences(run({"grpo": {"seed": 1}}), run({"grpo": {"seed": 1}}))
    assert found.verdict == "matched" and found.why.startswith("no difference but logging")


def test_true_is_not_1_but_1_is_1_point_0() -> None:
    found = differences(run({"a": True, "b": 1}), run({"a": 1, "b": 1.0}))
    assert list(kinds(found.config)) == ["a"]


def test_hybridep_pairs_of_the_performance_recipes_differ_in_the_dispatcher_only() -> None:
    for stem in ("grpo-qwen3-30ba3b-4n4g", "grpo-nemotron3-super-120BA12B-32n4g-async-1off"):
        path = RECIPES / f"performance/{stem}.yaml"
        hybrid = load_recipe(path, check=False).resolved
        keys = hybrid["policy"]["megatron_cfg"]
        baseline = {**hybrid, "policy": {**hybrid["policy"], "megatron_cfg": {**keys, "env_vars": None}}}
        for key in ("moe_flex_dispatcher_backend", "hybridep_num_ranks_per_nvlink_domain", "hybridep_use_mnnvl"):
            baseline["policy"]["megatron_cfg"][key] = None
        baseline["policy"]["megatron_cfg"] |= {
            "moe_token_dispatcher_type": "alltoall",
            "moe_hybridep_prepad_packed_inputs": False,
            "env_vars": {
                k: v
                for k, v in (keys["env_vars"] or {}).items()
                if k not in ("NVLINK_DOMAIN_SIZE", "USE_MNNVL") and "HYBRID_EP" not in k
            },
        }
        found = differences(run(baseline), run(hybrid))
        assert found.verdict == "matched", found.why
        assert found.treatment == ["dispatcher"]


def test_sync_against_async_of_the_tiny_recipe_names_what_else_differs() -> None:
    sync, ahead = (load_recipe(RECIPES / f"grpo-tiny-moe-cpu{end}.yaml").resolved for end in ("", "-async-1off"))
    found = differences(run(sync), run(ahead))
    assert found.treatment == ["placement"]
    assert {"loss_fn.use_importance_sampling_correction", "cluster.cpus_per_device"} <= set(
        kinds(found.of_kind("confounder"))
    )


def test_families_name_keys_that_the_schema_has() -> None:
    # Names of NeMo-RL alone, and patterns, are left out: there the schema has nothing to say.
    theirs = {"pipeline_dtype", "use_deep_gemm", "is_mx", "kv_cache_dtype"}
    plain = [p for patterns in FAMILIES.values() for p in patterns if "*" not in p and ".env_vars." not in p]
    missing = [p for p in plain if annotation_at(split_dotted(p)) is None and p.rpartition(".")[2] not in theirs]
    assert missing == []


def test_every_variable_of_hybrideps_topology_belongs_to_the_dispatcher() -> None:
    assert {family_of(f"policy.megatron_cfg.env_vars.{name}") for name in TOPOLOGY_ENV} == {"dispatcher"}


def test_a_treatment_that_is_no_family_and_no_key_is_a_user_error() -> None:
    with pytest.raises(UserError, match="--treatment dispatchr: expected one of dispatcher, placement"):
        check_treatment(["dispatchr"])
