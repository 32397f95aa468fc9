"""Guards against a dispatcher other than the recipe's, and a topology that HybridEP learns too late or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nemo_rl_moe.errors import UserError
from nemo_rl_moe.policy.megatron import dispatcher, versions
from nemo_rl_moe.policy.megatron.versions import VERSIONS, dispatcher_settings
from nemo_rl_moe.recipe.hybrid_ep import CHUNK_ENV, DOMAIN_ENV, MNNVL_ENV, RANKS_ENV, TOPOLOGY_ENV, topology
from nemo_rl_moe.recipe.schema import Recipe
from nemo_rl_moe.recipe.schema.policy import MegatronConfig
from tests.unit.policy.local_workers import make_recipe
from tests.unit.policy.megatron_runs import build_config

FLEX = {
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "flex",
    "moe_flex_dispatcher_backend": "hybridep",
    "moe_hybridep_num_sms": 32,
    "moe_hybridep_prepad_packed_inputs": True,
}
ENV = {RANKS_ENV: "2", MNNVL_ENV: "0", DOMAIN_ENV: "8", CHUNK_ENV: "128"}


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ((0, 16), {"moe_hybridep_num_sms": 32}),
        ((0, 17), {"moe_hybridep_num_sms": 32}),
        ((0, 18), {"moe_hybridep_num_sms": 32}),
        ((0, 19), {"moe_flex_dispatcher_num_sms": 32, "moe_hybridep_pad_uneven_dispatch_inputs": False}),
    ],
)
def test_32_sms_and_no_padding_in_layers_under_each_version_s_own_names(version, expected):
    settings = dispatcher_settings(MegatronConfig.model_validate(FLEX), version)
    assert settings == {
        "moe_token_dispatcher_type": "flex",
        "moe_flex_dispatcher_backend": "hybridep",
        **expected,
    }


def test_the_recipe_alone_chooses_dispatcher_and_backend():
    def chosen(**megatron):
        settings = dispatcher_settings(MegatronConfig.model_validate(megatron), (0, 19))
        return settings["moe_token_dispatcher_type"], settings.get("moe_flex_dispatcher_backend")

    assert chosen() == ("alltoall", None)
    assert chosen(moe_token_dispatcher_type="allgather") == ("allgather", None)
    assert chosen(**FLEX) == ("flex", "hybridep")
    assert chosen(**FLEX | {"moe_flex_dispatcher_backend": "deepep"}) == ("flex", "deepep")


def test_the_installed_megatron_takes_the_flex_settings(one_rank, moe_folder):
    (config,) = one_rank.call(build_config, moe_folder, FLEX)
    assert (config["moe_token_dispatcher_type"], config["moe_flex_dispatcher_backend"]) == ("flex", "hybridep")
    names = VERSIONS[config["version"]]
    assert config[names.num_sms["hybridep"]] == 32
    for name in (*names.num_sms.values(), names.pad_uneven):
        assert name is None or name in config


def test_a_megatron_outside_of_the_table_is_refused_with_the_range(monkeypatch):
    import megatron.core

    monkeypatch.setattr(megatron.core, "__version__", "0.20.0")
    with pytest.raises(UserError, match=r"megatron-core 0\.20\.0 is installed, expected 0\.16 to 0\.19"):
        versions.installed_version()


def recipe(gpu_type: str | None = "h200", **megatron) -> Recipe:
    return Recipe.model_validate(
        make_recipe("model", policy__megatron_cfg=FLEX | megatron, cluster__gpu_type=gpu_type, cluster__device="cuda")
    )


def sources(recipe: Recipe, environment: dict[str, str]) -> dict[str, tuple[str, str]]:
    return {v.name: (v.value, v.source) for v in topology(recipe, environment)}


def test_each_value_of_the_topology_comes_from_the_first_place_that_has_it():
    found = sources(recipe(hybridep_use_mnnvl=False, env_vars={RANKS_ENV: "2"}), {RANKS_ENV: "1", CHUNK_ENV: "64"})
    assert found == {
        RANKS_ENV: ("2", "env_vars"),
        MNNVL_ENV: ("0", "megatron_cfg"),
        DOMAIN_ENV: ("8", "gpu_type h200"),
        CHUNK_ENV: ("64", "environment"),
    }


def test_without_a_gpu_type_only_the_chunk_has_a_default():
    assert sources(recipe(gpu_type=None), {}) == {CHUNK_ENV: ("128", "default")}


def test_another_dispatcher_has_no_topology():
    assert topology(recipe(moe_token_dispatcher_type="alltoall", moe_flex_dispatcher_backend=None), ENV) == ()


@pytest.fixture
def hybrid_ep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like an installed HybridEP and a CUDA toolkit; returns the latter's nvcc."""
    for name in TOPOLOGY_ENV:
        monkeypatch.setenv(name, "unset by the test")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HYBRID_EP_CACHE_DIR", str(tmp_path))
    package, nvcc = tmp_path / "deep_ep", tmp_path / "cuda" / "bin" / "nvcc"
    for file in (package / "__init__.py", package / "hybrid_ep_buffer.py", nvcc):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    return nvcc


def test_rank_0_prints_one_line_with_every_source_and_all_ranks_set_the_variables(hybrid_ep, capsys):
    dispatcher.prepare(recipe(env_vars=ENV), rank=0)
    assert {name: os.environ[name] for name in TOPOLOGY_ENV} == ENV
    (line,) = capsys.readouterr().out.splitlines()
    assert line == (
        "HybridEP topology: EP 2, SMs 32, prepadding on, "
        f"{RANKS_ENV}=2 (env_vars), {MNNVL_ENV}=0 (env_vars), {DOMAIN_ENV}=8 (env_vars), {CHUNK_ENV}=128 (env_vars)"
    )
    dispatcher.prepare(recipe(env_vars=ENV), rank=1)
    assert capsys.readouterr().out == ""


def test_a_missing_compiler_or_library_is_refused_before_any_rank_waits(hybrid_ep, tmp_path, monkeypatch):
    hybrid_ep.unlink()
    with pytest.raises(UserError, match=r"compiles its kernels at run time, but .*nvcc does not exist"):
        dispatcher.prepare(recipe(env_vars=ENV), rank=0)
    monkeypatch.delenv("CUDA_HOME")
    with pytest.raises(UserError, match="CUDA_HOME is not set"):
        dispatcher.prepare(recipe(env_vars=ENV), rank=0)
    (tmp_path / "deep_ep" / "hybrid_ep_buffer.py").unlink()
    with pytest.raises(UserError, match="no deep_ep with HybridEP"):
        dispatcher.prepare(recipe(env_vars=ENV), rank=0)
