"""The order of prompts is a promise: a resumed run must train on what the interrupted one would have."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_moe.data.loader import PromptLoader
from nemo_rl_moe.data.prompt import Prompt
from nemo_rl_moe.errors import UserError


def prompts(count: int, answer: str = "1") -> list[Prompt]:
    return [Prompt(i, [i, i + 1], f"p{i}", "math", {"answer": answer}) for i in range(count)]


def ids(loader: PromptLoader) -> list[list[int]]:
    return [[p.id for p in batch] for batch in loader]


def test_12_prompts_in_steps_of_5_over_5_epochs_come_5_times_each() -> None:
    batches = ids(PromptLoader(prompts(12), 5, seed=0, max_epochs=5))
    assert [len(b) for b in batches] == [5] * 12
    flat = [i for b in batches for i in b]
    assert Counter(flat) == dict.fromkeys(range(12), 5)
    for epoch in range(5):
        assert sorted(flat[epoch * 12 : (epoch + 1) * 12]) == list(range(12))


def test_a_rest_that_fills_no_step_is_left_out_after_the_last_epoch_only() -> None:
    batches = ids(PromptLoader(prompts(12), 5, seed=0, shuffle=False, max_epochs=2))
    assert batches == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 0, 1, 2], [3, 4, 5, 6, 7]]


def test_without_shuffle_every_epoch_has_the_datasets_order() -> None:
    assert ids(PromptLoader(prompts(4), 2, seed=9, shuffle=False, max_epochs=2)) == [[0, 1], [2, 3]] * 2


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    def order(seed: int, step: int) -> list[int]:
        return [i for b in ids(PromptLoader(prompts(24), step, seed=seed, max_epochs=2)) for i in b]

    assert order(1, 4) == order(1, 8) == order(1, 4)
    assert order(1, 4) != order(2, 4)
    assert order(1, 4)[:24] != order(1, 4)[24:]


@given(
    count=st.integers(1, 30),
    step=st.integers(1, 30),
    epochs=st.integers(1, 4),
    cut=st.integers(0, 60),
    seed=st.integers(0),
)
def test_a_loader_resumed_after_any_step_gives_what_the_first_one_would_have(
    count: int, step: int, epochs: int, cut: int, seed: int
) -> None:
    step = min(step, count)
    whole = ids(PromptLoader(prompts(count), step, seed=seed, max_epochs=epochs))
    first = PromptLoader(prompts(count), step, seed=seed, max_epochs=epochs)
    head = [[p.id for p in batch] for _, batch in zip(range(cut), first, strict=False)]
    state = json.loads(json.dumps(first.state_dict()))
    second = PromptLoader(prompts(count), step, seed=seed, max_epochs=epochs)
    second.load_state_dict(state)
    assert head + ids(second) == whole


def test_resuming_with_a_smaller_step_goes_on_at_the_same_prompt() -> None:
    first = PromptLoader(prompts(12), 4, seed=3, max_epochs=1)
    head = [p.id for p in next(first)]
    second = PromptLoader(prompts(12), 2, seed=3, max_epochs=1)
    second.load_state_dict(first.state_dict())
    assert sorted(head + [i for b in ids(second) for i in b]) == list(range(12))


@pytest.mark.parametrize(
    "other", [prompts(11), prompts(12, answer="2"), [*prompts(11), Prompt(11, [0], "p11", "math", {"answer": "1"})]]
)
def test_a_state_of_other_prompts_is_refused(other: list[Prompt]) -> None:
    state = PromptLoader(prompts(12), 4, seed=3).state_dict()
    with pytest.raises(UserError, match=r"made with other training prompts \(12 of them, here are \d+"):
        PromptLoader(other, 4, seed=3).load_state_dict(state)


def test_a_state_of_another_order_is_refused_naming_the_key() -> None:
    state = PromptLoader(prompts(12), 4, seed=3).state_dict()
    with pytest.raises(UserError, match=r"grpo.seed: 4 here, 3 in the checkpoint"):
        PromptLoader(prompts(12), 4, seed=4).load_state_dict(state)
    with pytest.raises(UserError, match=r"data.shuffle: False here, True in the checkpoint"):
        PromptLoader(prompts(12), 4, seed=3, shuffle=False).load_state_dict(state)


def test_the_epoch_counts_from_0_and_follows_the_prompts_given_out() -> None:
    loader = PromptLoader(prompts(4), 2, seed=0, max_epochs=3)
    epochs = [loader.epoch]
    for _ in loader:
        epochs.append(loader.epoch)
    assert epochs == [0, 0, 1, 1, 2, 2, 3]


def test_fewer_prompts_than_a_step_are_refused() -> None:
    with pytest.raises(UserError, match="3 prompts do not fill a step of 4"):
        PromptLoader(prompts(3), 4, seed=0)
