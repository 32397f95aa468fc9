"""Risk guarded: a mean of means. The loss must not know how its batch was cut into micro-batches and ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_moe.grpo.loss import grpo_loss
from nemo_rl_moe.grpo.types import GlobalCounts, TokenBatch
from nemo_rl_moe.recipe.schema import LossConfig
from tests.unit.grpo.reference import Case, random_case
from tests.unit.grpo.test_loss import VARIANTS


def summed(config: LossConfig, case: Case, parts: list[np.ndarray]) -> tuple[dict[str, float], np.ndarray]:
    """Metrics and gradient with each part as a micro-batch: shares added, extremes joined."""
    gradient, results = np.zeros(len(case.mask)), []
    for rows in parts:
        batch = case.batch(rows=rows)
        loss, metrics = grpo_loss(config, batch, case.counts)
        loss.backward()
        gradient[rows] = batch.logprobs.grad.numpy()
        results.append({name: value.item() for name, value in metrics.items()})
    joined = {}
    for name in results[0]:
        join = max if name.endswith("_max") else min if name.endswith("_min") else sum
        joined[name] = join(r[name] for r in results)
    del joined["empty_microbatches"]
    return joined, gradient


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_split_of_sequences_adds_up_to_the_same_loss_gradient_and_metrics_to_1e_12(name, data):
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=7))
    case = random_case(data.draw(st.integers(0, 10_000)), lengths)
    where = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths))))
    config = LossConfig(**VARIANTS[name])
    parts = [np.flatnonzero(where[case.sequences] == part) for part in range(4)]
    whole, whole_gradient = summed(config, case, [np.arange(len(case.mask))])
    split, split_gradient = summed(config, case, parts)
    assert split == pytest.approx(whole, rel=1e-12, abs=1e-12)
    assert split_gradient == pytest.approx(whole_gradient, rel=1e-12, abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), data=st.data())
def test_a_token_mean_may_even_be_split_within_sequences(seed, data):
    case = random_case(seed)
    where = np.array(data.draw(st.lists(st.integers(0, 2), min_size=20, max_size=20)))
    config = LossConfig(**VARIANTS["tis"])
    whole, whole_gradient = summed(config, case, [np.arange(20)])
    split, split_gradient = summed(config, case, [np.flatnonzero(where == part) for part in range(3)])
    assert split == pytest.approx(whole, rel=1e-12, abs=1e-12)
    assert split_gradient == pytest.approx(whole_gradient, abs=1e-12)


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000), shuffle=st.permutations(range(20)))
def test_tokens_in_any_order_and_sequences_renumbered_give_the_same_loss_and_gradient(name, seed, shuffle):
    case, rows = random_case(seed), np.array(shuffle)
    config = LossConfig(**VARIANTS[name])
    whole, whole_gradient = summed(config, case, [np.arange(20)])
    shuffled, shuffled_gradient = summed(config, case, [rows])
    assert shuffled == pytest.approx(whole, rel=1e-12, abs=1e-12)
    assert shuffled_gradient == pytest.approx(whole_gradient, abs=1e-12)
    case.sequences = np.array([7, 3, 0, 9, 4])[case.sequences]
    renumbered, renumbered_gradient = summed(config, case, [np.arange(20)])
    assert renumbered == pytest.approx(whole, rel=1e-12, abs=1e-12)
    assert renumbered_gradient == pytest.approx(whole_gradient, abs=1e-12)


def losses_of_1_and_0(rows: list[int]) -> TokenBatch:
    """Two tokens with loss 1 (sequence 0), then eight with loss 0 (sequence 1), of which `rows`."""
    advantages = torch.tensor([-1.0] * 2 + [0.0] * 8)[rows]
    logprobs = torch.full((len(rows),), -1.0, requires_grad=True)
    frozen = logprobs.detach()
    ids = torch.tensor([0] * 2 + [1] * 8)[rows]
    return TokenBatch(logprobs, frozen, frozen, frozen, advantages, torch.ones(len(rows)), ids, 2)


SPLITS = [
    [list(range(10))],
    [[0, 1], list(range(2, 10))],
    [[0], [1], [2, 3, 4], [5, 6, 7, 8, 9]],
    [[i] for i in range(10)],
]


@pytest.mark.parametrize("split", SPLITS)
def test_2_tokens_of_loss_1_and_8_of_loss_0_have_token_mean_0_2_for_any_split(split):
    shares = [grpo_loss(LossConfig(), losses_of_1_and_0(rows), GlobalCounts(10, 2))[0].item() for rows in split]
    assert sum(shares) == pytest.approx(0.2, abs=1e-7)


def test_the_same_10_tokens_have_sample_mean_0_5_when_asked_for():
    config = LossConfig(token_level_loss=False)
    shares = [grpo_loss(config, losses_of_1_and_0(rows), GlobalCounts(10, 2))[0].item() for rows in SPLITS[1]]
    assert sum(shares) == pytest.approx(0.5, abs=1e-7)
