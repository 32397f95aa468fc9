"""The async loop whole, with workers of random speed that fail at random: the four promises of the replay buffer must
hold through collector, dispatcher, generator and data loader, in real threads."""

from __future__ import annotations

import itertools
import random
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_moe.loops import async_one_off, checkpointing
from nemo_rl_moe.loops.components import Run
from nemo_rl_moe.loops.rollout import sampling_spec
from nemo_rl_moe.recipe.load import load_recipe
from nemo_rl_moe.recipe.schema import Recipe
from tests.functional.cli import MODEL, RECIPES
from tests.unit.loops.fake_workers import FakePolicy, FakeWorkers, killed, make_run, run_to_its_end

SETTINGS = [
    f"policy.model_name={MODEL}",
    "grpo.num_generations_per_prompt=2",
    "grpo.val_period=0",
    "grpo.async_grpo.max_generation_failures=1000000",
    "logger.num_rollout_samples=0",
]
BASE = load_recipe(RECIPES / "grpo-tiny-moe-cpu-async-1off.yaml", SETTINGS).recipe


def recipe(*, steps: int, per_step: int, epochs: int = 1, save_period: int = 0, **ahead: object) -> Recipe:
    """The shipped recipe with other numbers; `ahead` are keys of grpo.async_grpo."""
    grpo = BASE.grpo.model_copy(
        update={
            "max_num_steps": steps,
            "num_prompts_per_step": per_step,
            "max_num_epochs": epochs,
            "async_grpo": BASE.grpo.async_grpo.model_copy(update=ahead),
        }
    )
    saving = BASE.checkpointing.model_copy(
        update={"enabled": save_period > 0, "save_period": save_period or 1, "save_hf": False, "keep_top_k": None}
    )
    return BASE.model_copy(update={"grpo": grpo, "checkpointing": saving})


def chances(seed: int, share: float) -> object:
    """Whether the n-th of something happens, the same in every call."""
    return lambda number: random.Random(f"{seed}/{number}").random() < share


def workers(size: int, seed: int, failing: float) -> FakeWorkers:
    """Attempts take up to 2 ms; a share of them, and of the weight updates, kills its worker."""
    return FakeWorkers(
        size,
        seconds=lambda prompt, attempt: random.Random(f"{seed}/{prompt}/{attempt}").random() * 2e-3,
        fails=chances(seed, failing),
        update_fails=chances(seed + 1, failing / 4),
    )


def order_of_the_data(run_recipe: Recipe, prompts: int) -> list[list[int]]:
    """Prompts of each step, straight from a loader."""
    with tempfile.TemporaryDirectory() as folder:
        loader = make_run(run_recipe, prompts, FakeWorkers(), FakePolicy(), Path(folder)).data.loader
    return [[p.id for p in step] for step in itertools.islice(loader, run_recipe.grpo.max_num_steps)]


def seeds(run: Run, steps: int) -> list[set[int]]:
    """What `FakePolicy.seeds` must be, from the formula of the sync loop."""
    return [{sampling_spec(run, step).seed % 1000} for step in range(1, steps + 1)]


def check_ages(policy: FakePolicy, first_version: int, max_age: int) -> None:
    """Every sample of every step is of an allowed version."""
    for version, begun in enumerate(policy.versions, first_version):
        assert all(version - max_age <= v <= version for v in begun), (version, begun)


AHEAD = st.fixed_dictionaries(
    {
        "max_trajectory_age_steps": st.integers(0, 3),
        "in_flight_weight_updates": st.booleans(),
        "running_requests": st.sampled_from(["wait", "abort"]),
        "request_routing": st.sampled_from(["round_robin", "least_loaded"]),
    }
)


@settings(max_examples=150, deadline=None)
@given(
    ahead=AHEAD,
    steps=st.integers(1, 8),
    per_step=st.integers(1, 3),
    prompts=st.integers(3, 10),
    epochs=st.integers(1, 3),
    size=st.integers(1, 3),
    failing=st.sampled_from([0.0, 0.2]),
    train_ms=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 1000),
)
def test_each_prompt_trains_once_an_epoch_in_order_within_its_age_whatever_takes_long_or_fails(
    ahead: dict,
    steps: int,
    per_step: int,
    prompts: int,
    epochs: int,
    size: int,
    failing: float,
    train_ms: float,
    seed: int,
) -> None:
    made = recipe(steps=steps, per_step=per_step, epochs=epochs, **ahead)
    policy = FakePolicy(seconds=train_ms / 1000)
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(made, prompts, workers(size, seed, failing), policy, Path(folder))
        run_to_its_end(async_one_off.train, run)
    assert policy.prompts == order_of_the_data(made, prompts)
    assert len(policy.prompts) == min(steps, epochs * prompts // per_step)
    trained = list(itertools.chain.from_iterable(policy.prompts))
    for start in range(0, len(trained), prompts):
        epoch = trained[start : start + prompts]
        assert max(Counter(epoch).values()) == 1
        assert len(epoch) < prompts or sorted(epoch) == list(range(prompts))
    assert policy.seeds == seeds(run, len(policy.seeds))
    check_ages(policy, 1, ahead["max_trajectory_age_steps"])
    ages = [version - min(begun) for version, begun in enumerate(policy.versions, 1)]
    assert [run.tracker.rows[step]["train/trajectory_age_max"] for step in range(1, len(ages) + 1)] == ages


@settings(max_examples=60, deadline=None)
@given(
    ahead=AHEAD,
    steps=st.integers(2, 8),
    killed_at=st.integers(1, 8),
    save_period=st.integers(1, 3),
    failing=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 1000),
)
def test_a_run_killed_at_any_step_and_resumed_trains_the_prompts_of_a_whole_run(
    ahead: dict, steps: int, killed_at: int, save_period: int, failing: float, seed: int
) -> None:
    made = recipe(steps=steps, per_step=2, epochs=3, save_period=save_period, **ahead)
    first, second = FakePolicy(killed_at=killed_at), FakePolicy()
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(made, 7, workers(2, seed, failing), first, Path(folder))
        with killed():
            run_to_its_end(async_one_off.train, run)
        again = make_run(made, 7, workers(2, seed + 1, failing), second, Path(folder))
        root = Path(folder) / "checkpoints"
        if saved := checkpointing.complete_checkpoints(root):
            checkpointing.resume(again, *checkpointing.newest(root))
        run_to_its_end(async_one_off.train, again)
    kept = saved[-1][0] if saved else 0
    assert kept == (steps if killed_at > steps else (killed_at - 1) // save_period * save_period)
    assert first.prompts[:kept] + second.prompts == order_of_the_data(made, 7)
    assert first.seeds[:kept] + second.seeds == seeds(run, steps)
    check_ages(second, 1 + kept, ahead["max_trajectory_age_steps"])


def test_prompts_ten_times_as_slow_keep_their_quarter_of_what_is_trained(tmp_path: Path) -> None:
    made = recipe(steps=20, per_step=4, max_trajectory_age_steps=1, in_flight_weight_updates=True)
    slow = FakeWorkers(2, seconds=lambda prompt, _: 0.01 if prompt % 4 == 3 else 0.001)
    policy = FakePolicy(seconds=0.002)
    run_to_its_end(async_one_off.train, make_run(made, 80, slow, policy, tmp_path))
    trained = list(itertools.chain.from_iterable(policy.prompts))
    assert sorted(trained) == list(range(80))
    check_ages(policy, 1, 1)
    # The generator does run ahead: at age 0 the test would pass without a bound.
    assert {version - v for version, begun in enumerate(policy.versions, 1) for v in begun} == {0, 1}


def test_the_last_two_steps_fail_three_times_and_are_trained(tmp_path: Path) -> None:
    made = recipe(steps=4, per_step=2, max_trajectory_age_steps=1)
    failing = FakeWorkers(2, fails=lambda attempt: 4 <= attempt < 16)
    policy = FakePolicy()
    run = make_run(made, 8, failing, policy, tmp_path)
    run_to_its_end(async_one_off.train, run)
    assert policy.prompts == order_of_the_data(made, 8)
    assert failing.attempts >= 8 + 12


def test_trainer_and_generator_apart_by_more_than_1_1_is_a_warning_and_1_1_is_none(tmp_path: Path) -> None:
    made = recipe(steps=3, per_step=2)
    for error, warnings in ((1.1, 0), (1.1 + 1e-9, 1)):
        run = make_run(made, 6, FakeWorkers(), FakePolicy(error=error), tmp_path)
        run_to_its_end(async_one_off.train, run)
        told = [e for e in run.tracker.events if e.startswith("warning: the median of train/token_mult_prob_error")]
        assert len(told) == warnings
        assert all("is 1.100, above grpo.token_mult_prob_error_warning of 1.1" in event for event in told)
