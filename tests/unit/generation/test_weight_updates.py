"""Weight updates of a live engine: right afterwards, counted, and never half-done in silence. Real vLLM on CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from nemo_rl_moe.generation.engine_worker import EngineUnusable
from nemo_rl_moe.generation.interface import SamplingSpec
from nemo_rl_moe.refit.digest import weight_digest
from nemo_rl_moe.refit.layout import WeightLayout
from nemo_rl_moe.refit.shared_memory import SharedBuffer
from tests.unit.generation.engine_process import Engine, EngineProcess
from tests.unit.generation.tiny_qwen import (
    checkpoint_tensors,
    make_model,
    random_prompts,
    save_model,
    worst_logprob_error,
)

TOLERANCE = 5e-5
SPEC = SamplingSpec(1.0, 24, 2, seed=0)
# What two different random models differ by at least; the workaround's absence gives more.
WRONG_WEIGHTS = 1.0


@pytest.fixture
def without_workarounds(engine_process: EngineProcess) -> Iterator[None]:
    """Switches the workarounds for reloads on CPU off for one test."""
    engine_process.set_cpu_workarounds(False)
    yield
    engine_process.set_cpu_workarounds(True)


def test_logprobs_match_transformers_to_5e_5_at_versions_1_2_3_with_changed_weights(
    new_engine: Callable[..., Engine],
) -> None:
    engine, prompts = new_engine(), random_prompts(8, seed=20)
    assert engine.generate(prompts, SPEC).weight_versions.tolist() == [0] * 16
    for version, seed in ((1, 0), (2, 21), (3, 22)):
        model = make_model("moe", seed)
        assert engine.refit(model) == version
        for spec in (SPEC, SamplingSpec(0.7, 24, 2, seed=0)):
            completions = engine.generate(prompts, spec)
            assert completions.weight_versions.tolist() == [version] * 16
            assert worst_logprob_error(model, prompts, completions, spec) <= TOLERANCE


def test_a_moe_reload_on_cpu_is_off_by_more_than_1_without_the_workaround(
    new_engine: Callable[..., Engine], without_workarounds: None
) -> None:
    """If this fails, vLLM has fixed the reload: drop `reset_moe_kernels` for that version in vllm_compat.py."""
    engine, prompts, model = new_engine(), random_prompts(8, seed=23), make_model("moe", 24)
    engine.refit(model)
    assert worst_logprob_error(model, prompts, engine.generate(prompts, SPEC), SPEC) > WRONG_WEIGHTS


def test_a_tied_reload_on_cpu_is_off_by_more_than_1_without_the_workaround(
    new_engine: Callable[..., Engine], without_workarounds: None, tmp_path: Path
) -> None:
    """If this fails, vLLM has fixed the reload: drop `repack_tied_head` for that version in vllm_compat.py."""
    engine = new_engine(save_model(make_model("dense", 0, tied=True), tmp_path / "dense"))
    prompts, model = random_prompts(8, seed=23), make_model("dense", 24, tied=True)
    engine.refit(model)
    assert worst_logprob_error(model, prompts, engine.generate(prompts, SPEC), SPEC) > WRONG_WEIGHTS


def test_a_reload_after_a_reload_of_the_same_weights_changes_no_draw(engine: Engine) -> None:
    prompts, model = random_prompts(8, seed=25), make_model("moe", 26)
    engine.refit(model)
    before = engine.generate(prompts, SPEC)
    engine.refit(model)
    after = engine.generate(prompts, SPEC)
    assert np.array_equal(before.token_ids, after.token_ids)
    assert np.array_equal(before.logprobs, after.logprobs)


def prompts_with_shared_prefix() -> list[list[int]]:
    """8 prompts that begin with the same 96 tokens, three whole cache blocks."""
    shared = random_prompts(1, seed=27, shortest=96, longest=96)[0]
    return [shared + tail for tail in random_prompts(8, seed=28, shortest=4, longest=8)]


def test_cached_prefixes_of_old_weights_are_not_used_after_an_update(engine: Engine) -> None:
    prompts = prompts_with_shared_prefix()
    for seed in (29, 30):
        model = make_model("moe", seed)
        engine.refit(model)
        for _ in range(2):
            completions = engine.generate(prompts, SPEC)
            assert worst_logprob_error(model, prompts, completions, SPEC) <= TOLERANCE


@pytest.mark.parametrize("salted", [False, True])
def test_without_reset_and_salt_of_the_prefix_cache_logprobs_are_off_by_more_than_1(
    engine: Engine, salted: bool
) -> None:
    """Without this the test above could pass because nothing was cached. Salt alone is enough."""
    prompts, model = prompts_with_shared_prefix(), make_model("moe", 29 + salted)
    engine.process.set_prefix_cache_reset(engine.name, False)
    if not salted:
        engine.process.set_cache_salt(engine.name, False)
    try:
        engine.generate(prompts, SPEC)
        engine.refit(model)
        error = worst_logprob_error(model, prompts, engine.generate(prompts, SPEC), SPEC)
        assert (error <= TOLERANCE) if salted else (error > WRONG_WEIGHTS)
    finally:
        if not salted:
            engine.process.set_cache_salt(engine.name, True)
        engine.process.set_prefix_cache_reset(engine.name, True)
        engine.process.call(engine.name, "reset_prefix_cache")


def test_fused_expert_tensors_of_transformers_load_as_well_as_one_by_one(engine: Engine) -> None:
    model, prompts = make_model("moe", 31), random_prompts(4, seed=32)
    engine.refit(model, tensors=dict(model.state_dict()))
    assert worst_logprob_error(model, prompts, engine.generate(prompts, SPEC), SPEC) <= TOLERANCE


@pytest.mark.parametrize(("kind", "tied"), [("dense", False), ("dense", True), ("moe", True)])
def test_dense_and_tied_models_refit_twice_to_5e_5(
    new_engine: Callable[..., Engine], tmp_path: Path, kind: str, tied: bool
) -> None:
    engine = new_engine(save_model(make_model(kind, 0, tied), tmp_path / "model"))
    prompts = random_prompts(8, seed=34)
    for seed in (33, 34):
        model = make_model(kind, seed, tied)
        engine.refit(model)
        assert worst_logprob_error(model, prompts, engine.generate(prompts, SPEC), SPEC) <= TOLERANCE


@pytest.mark.parametrize("step", [0, 2, -1])
def test_a_version_that_is_not_the_next_one_is_refused_and_the_engine_goes_on(engine: Engine, step: int) -> None:
    model = make_model("moe", 35)
    version = engine.refit(model)
    with pytest.raises(ValueError, match=f"weight version {version + step} after {version}, expected {version + 1}"):
        engine.refit(model, version=version + step)
    assert engine.generate([[5, 6]], SPEC).weight_versions.tolist() == [version] * 2


def test_a_new_engine_takes_version_41_of_a_resumed_run_and_then_only_42(new_engine: Callable[..., Engine]) -> None:
    engine, model = new_engine(), make_model("moe", 36)
    assert engine.refit(model, version=41) == 41
    assert engine.refit(model) == 42


def _without(name: str) -> Callable[[dict], dict]:
    return lambda tensors: {k: v for k, v in tensors.items() if k != name}


def _cut_rows(name: str) -> Callable[[dict], dict]:
    return lambda tensors: {k: v[:-1].contiguous() if k == name else v for k, v in tensors.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("model.norm.weight"), "model.norm.weight: 0 elements, the model has 64"),
        (_without("model.layers.1.mlp.experts.5.up_proj.weight"), r"layers.1.mlp.experts: 94208 elements.* 98304"),
        (_cut_rows("lm_head.weight"), "lm_head.weight: 32704 elements, the model has 32768"),
        (
            lambda t: t | {"model.layers.2.input_layernorm.weight": t["model.norm.weight"]},
            "model.layers.2.input_layernorm.weight: 64 elements, the model has 0",
        ),
    ],
    ids=["missing tensor", "missing expert matrix", "missing row", "tensor of a further layer"],
)
def test_a_layout_that_is_not_the_models_is_an_error_and_the_engine_then_refuses_to_generate(
    new_engine: Callable[..., Engine], change: Callable[[dict], dict], message: str
) -> None:
    engine, model = new_engine(), make_model("moe", 37)
    failure = f"unusable: weight update to version 1: update_weights failed: .*{message}"
    with pytest.raises(EngineUnusable, match=failure):
        engine.refit(model, tensors=change(checkpoint_tensors(model)))
    with pytest.raises(
        EngineUnusable, match=f"unusable: weight update to version 1: update_weights failed: .*{message}"
    ):
        engine.generate([[5, 6]], SPEC)
    with pytest.raises(EngineUnusable, match=failure):
        engine.refit(model)


def test_a_buffer_shorter_than_the_layout_is_an_error_with_both_sizes(new_engine: Callable[..., Engine]) -> None:
    engine, model = new_engine(), make_model("moe", 38)
    layout = WeightLayout.build((k, v.dtype, v.shape) for k, v in checkpoint_tensors(model).items())
    with (
        SharedBuffer.create(layout.nbytes - 64) as buffer,
        pytest.raises(EngineUnusable, match=f"has {layout.nbytes - 64} bytes, expected {layout.nbytes}"),
    ):
        engine.update(str(buffer.path), layout.to_plain(), {}, 1)
    with pytest.raises(EngineUnusable):
        engine.generate([[5, 6]], SPEC)


def test_an_update_with_a_damaged_tensor_is_refused_with_its_name_and_loads_nothing(
    new_engine: Callable[..., Engine],
) -> None:
    engine, model, damaged = new_engine(), make_model("moe", 39), "model.layers.1.mlp.experts.5.up_proj.weight"
    tensors = checkpoint_tensors(model)
    layout = WeightLayout.build((k, v.dtype, v.shape) for k, v in tensors.items())
    with SharedBuffer.create(layout.nbytes) as buffer:
        views = layout.views(buffer.tensor)
        for name, view in views.items():
            view.copy_(tensors[name])
        sent = weight_digest(views, 1)
        views[damaged][32, 0] += 1e-3
        with pytest.raises(EngineUnusable, match=f"1 of {len(sent)} sampled tensors are not what was sent: {damaged}$"):
            engine.update(str(buffer.path), layout.to_plain(), sent, 1)
    assert engine.version() == 0
