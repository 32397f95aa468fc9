"""Risk guarded: a generator that gave its memory to the trainer samples from what lies there now.

vLLM's sleep and wake-up run here as they do on a GPU, except that its CPU worker frees nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from nemo_rl_moe.generation.interface import SamplingSpec
from nemo_rl_moe.generation.sleep import KV_CACHE, WEIGHTS, SleepState
from tests.unit.generation.engine_process import Engine, EngineProcess
from tests.unit.generation.tiny_qwen import make_model, random_prompts

SPEC = SamplingSpec(1.0, 16, 2, seed=9)


def test_an_engine_may_sample_only_when_both_kinds_of_memory_are_back_and_its_weights_were_updated() -> None:
    state = SleepState()
    state.check_ready_to_sample()
    assert state.fall_asleep() and not state.fall_asleep()
    for tag, refusal in ((WEIGHTS, "asleep .kv_cache"), (KV_CACHE, "dropped its weights")):
        assert (state.wake([tag]), state.wake([tag])) == ([tag], [])
        with pytest.raises(RuntimeError, match=refusal):
            state.check_ready_to_sample()
    state.updated()
    state.check_ready_to_sample()


def test_an_update_needs_room_for_weights_and_no_cache() -> None:
    state = SleepState()
    state.fall_asleep()
    with pytest.raises(RuntimeError, match="weights are asleep"):
        state.check_ready_for_update()
    state.wake([WEIGHTS])
    state.check_ready_for_update()
    assert state.wake(None) == [KV_CACHE]


@pytest.fixture(params=["no memory given back", "vLLM's own sleep"])
def sleeper(engine: Engine, engine_process: EngineProcess, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine_process.set_real_sleep(request.param == "vLLM's own sleep")
    yield engine
    engine_process.set_real_sleep(False)


def test_after_sleep_update_and_waking_an_engine_samples_the_same_tokens_as_before(sleeper: Engine) -> None:
    model, prompts = make_model("moe", 11), random_prompts(6, seed=1)
    sleeper.refit(model)
    before = sleeper.generate(prompts, SPEC)
    sleeper.process.call(sleeper.name, "sleep")
    with pytest.raises(RuntimeError, match="asleep"):
        sleeper.generate(prompts, SPEC)
    with pytest.raises(RuntimeError, match="weights are asleep"):
        sleeper.refit(model)
    sleeper.process.call(sleeper.name, "wake", [WEIGHTS])
    version = sleeper.refit(model)
    with pytest.raises(RuntimeError, match="asleep"):
        sleeper.generate(prompts, SPEC)
    sleeper.process.call(sleeper.name, "wake", [KV_CACHE])
    after = sleeper.generate(prompts, SPEC)
    assert np.array_equal(before.token_ids, after.token_ids)
    assert np.array_equal(before.logprobs, after.logprobs)
    assert set(after.weight_versions) == {version}
