"""Which worker gets the next prompt: by the recipe a slow one less than a fast one, or each in turn."""

from __future__ import annotations

import pytest

from nemo_rl_moe.data.prompt import Prompt
from nemo_rl_moe.errors import PhaseTimeout
from nemo_rl_moe.generation.dispatcher import Dispatcher
from nemo_rl_moe.generation.generator import Generator
from nemo_rl_moe.generation.interface import SamplingSpec
from nemo_rl_moe.recipe.schema import Recipe
from tests.unit.loops.fake_workers import FakeWorkers
from tests.unit.policy.local_workers import make_recipe

SPEC = SamplingSpec(1.0, 2, 3, seed=0)


def dispatcher(workers: FakeWorkers, **keys: object) -> Dispatcher[int]:
    recipe = Recipe.model_validate(make_recipe("m", **keys))
    return Dispatcher(Generator(workers, recipe), recipe)  # type: ignore[arg-type]


def send(chosen: Dispatcher[int], numbers: range) -> None:
    for number in numbers:
        chosen.send(number, Prompt(number, [1], "", "math"), SPEC, 0)


@pytest.mark.parametrize(
    ("routing", "ranks"),
    [
        # Worker 0 still has prompts 0 and 3, the others are idle: they take two more each before it gets one.
        ("least_loaded", [1, 2, 1, 2, 0, 1, 2, 0]),
        ("round_robin", [1, 2, 0, 1, 2, 0, 1, 2]),
    ],
)
def test_8_prompts_for_a_busy_worker_and_two_idle_ones(routing: str, ranks: list[int]) -> None:
    workers = FakeWorkers(3, seconds=lambda prompt, _: 60.0 if prompt in (0, 3) else 0.0)
    chosen = dispatcher(workers, grpo__async_grpo__request_routing=routing)
    send(chosen, range(4))
    assert [rank for rank, _ in workers.sent] == [0, 1, 2, 0]
    assert sorted(answer.tag for answer in chosen.collect(0.0)) == [1, 2]
    send(chosen, range(4, 12))
    assert [rank for rank, _ in workers.sent[4:]] == ranks


def test_a_call_past_the_limit_of_0_1_s_names_phase_and_rank() -> None:
    workers = FakeWorkers(2, seconds=lambda prompt, _: 60.0 if prompt == 1 else 0.0)
    chosen = dispatcher(workers, cluster__timeouts__generation_s=0.1)
    send(chosen, range(2))
    assert [answer.tag for answer in chosen.collect(0.0)] == [0]
    with pytest.raises(PhaseTimeout, match=r"generation: .*generation rank 1"):
        chosen.collect(0.2)
