"""Risk guarded: a correction that caps where it should mask, or lets one broken token through."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_moe.grpo.importance import importance_weights, sequence_error_mask
from nemo_rl_moe.grpo.metrics import agreement_metrics
from tests.unit.grpo.reference import random_case, truncate

TRAIN = torch.tensor([-1.0, -2.0, -0.5])
ROLLOUT = torch.tensor([-1.0, -3.0, -0.5])
ONES, ONE_SEQUENCE = torch.ones(3), torch.zeros(3, dtype=torch.int64)


def weights(train=TRAIN, rollout=ROLLOUT, mask=ONES, ids=ONE_SEQUENCE, n=1, **kwargs):
    found, outside = importance_weights(train, rollout, mask, ids, n, **kwargs)
    return found.tolist(), outside.tolist()


def test_without_truncation_weights_are_1_2_718_1():
    assert weights() == (pytest.approx([1, math.e, 1]), [False] * 3)


def test_tis_with_cap_2_gives_1_2_1():
    assert weights(truncation="tis", upper=2.0) == (pytest.approx([1, 2, 1]), [False, True, False])


def test_a_mask_of_0_5_to_2_gives_1_0_1():
    found = weights(truncation="icepop", upper=2.0, lower=0.5)
    assert found == (pytest.approx([1, 0, 1]), [False, True, False])


def test_icepop_drops_weights_below_the_lower_bound_too():
    found, outside = weights(train=ROLLOUT, rollout=TRAIN, truncation="icepop", upper=2.0, lower=0.5)
    assert found == [1.0, 0.0, 1.0]
    assert outside == [False, True, False]


def test_seq_mask_tis_masks_the_sequence_whose_geometric_mean_is_1_396_and_keeps_the_weights_of_the_other():
    # exp((0 + 1 + 0) / 3) = 1.396 for the first sequence; the second has weights 3 and 1/3, mean 1.
    third = math.log(3)
    train, rollout = torch.cat([TRAIN, torch.tensor([-1.0, -2.0])]), torch.cat([ROLLOUT, torch.tensor([-1.0, -2.0])])
    train[3:] += torch.tensor([third, -third])
    ids = torch.tensor([0, 0, 0, 1, 1])
    found, outside = importance_weights(
        train, rollout, torch.ones(5), ids, 2, truncation="seq-mask-tis", upper=1.3, lower=0.7
    )
    assert found.tolist() == pytest.approx([0, 0, 0, 3, 1 / 3])
    assert outside.tolist() == [True, True, True, False, False]


def test_sequence_level_weights_are_the_product_2_718_on_every_token():
    assert weights(sequence_level=True) == (pytest.approx([math.e] * 3), [False] * 3)
    assert weights(sequence_level=True, truncation="tis", upper=2.0)[0] == [2.0, 2.0, 2.0]


def test_a_masked_token_enters_neither_product_nor_geometric_mean():
    mask = torch.tensor([1.0, 0.0, 1.0])
    assert weights(mask=mask, sequence_level=True)[0] == [1.0, 1.0, 1.0]
    assert weights(mask=mask, truncation="seq-mask-tis", upper=1.1)[1] == [False] * 3


@pytest.mark.parametrize("truncation", [None, "tis", "icepop", "seq-mask-tis"])
@pytest.mark.parametrize("sequence_level", [True, False])
def test_weights_are_finite_for_nan_and_infinite_log_probabilities(truncation, sequence_level):
    train = torch.tensor([math.nan, 0.0, -math.inf, -1.0])
    rollout = torch.tensor([-1.0, -math.inf, -1.0, math.nan])
    found, outside = importance_weights(
        train,
        rollout,
        torch.ones(4),
        torch.arange(4),
        4,
        truncation=truncation,
        upper=2.0,
        lower=0.5,
        sequence_level=sequence_level,
    )
    assert torch.isfinite(found).all()
    assert found[0] == found[3] == 0.0
    assert outside[0] and outside[3]


def test_a_token_the_generator_called_impossible_is_capped_by_tis_at_2_and_zeroed_by_icepop():
    train, rollout, one = torch.tensor([-1.0]), torch.tensor([-math.inf]), torch.ones(1)
    ids = torch.zeros(1, dtype=torch.int64)
    assert importance_weights(train, rollout, one, ids, 1, truncation="tis", upper=2.0)[0].item() == 2.0
    assert importance_weights(train, rollout, one, ids, 1, truncation="icepop", upper=2.0)[0].item() == 0.0


@pytest.mark.parametrize("truncation", ["tis", "icepop", "seq-mask-tis"])
def test_a_weight_at_either_bound_is_inside(truncation):
    # One token a sequence, so that each geometric mean is its token's weight. Powers of 2 have exact logarithms' exps.
    train, rollout = torch.tensor([2.0, 0.5, 1.0], dtype=torch.float64).log(), torch.zeros(3, dtype=torch.float64)
    ids = torch.arange(3)
    found, outside = importance_weights(
        train, rollout, torch.ones(3), ids, 3, truncation=truncation, upper=2.0, lower=0.5
    )
    assert (found.tolist(), outside.tolist()) == ([2.0, 0.5, 1.0], [False] * 3)


@pytest.mark.parametrize("truncation", [None, "tis", "icepop", "seq-mask-tis"])
@pytest.mark.parametrize("sequence_level", [True, False])
@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    spread=st.floats(0.0, 3.0),
    bounds=st.tuples(st.floats(0.0, 1.0), st.floats(1.0, 5.0)),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6),
)
def test_weights_and_bounds_equal_a_float64_loop(truncation, sequence_level, seed, spread, bounds, lengths):
    case = random_case(seed, lengths, spread)
    config = {
        "truncated_importance_sampling_type": truncation,
        "truncated_importance_sampling_ratio": bounds[1],
        "truncated_importance_sampling_ratio_min": bounds[0],
    }
    batch = case.batch()
    found, outside = importance_weights(
        batch.prev_logprobs,
        batch.generation_logprobs,
        batch.mask,
        batch.sequence_ids,
        batch.num_sequences,
        truncation=truncation,
        upper=bounds[1],
        lower=bounds[0],
        sequence_level=sequence_level,
    )
    for t in np.flatnonzero(case.mask):
        own = [u for u in np.flatnonzero(case.mask) if case.sequences[u] == case.sequences[t]]
        logs = [case.prev[u] - case.generation[u] for u in own]
        weight = math.exp(math.fsum(logs) if sequence_level else case.prev[t] - case.generation[t])
        expected = truncate(config, weight, math.exp(math.fsum(logs) / len(logs)))
        assert (found[t].item(), bool(outside[t])) == (pytest.approx(expected[0], rel=1e-12), expected[1])
    assert not outside[batch.mask == 0].any()


def test_weights_carry_no_gradient():
    train = TRAIN.clone().requires_grad_()
    assert not importance_weights(train, ROLLOUT, ONES, ONE_SEQUENCE, 1)[0].requires_grad


def test_a_truncation_without_a_bound_and_bounds_2_over_1_are_errors():
    with pytest.raises(ValueError, match="'tis' needs an upper bound"):
        weights(truncation="tis")
    with pytest.raises(ValueError, match=r"lower bound 2\.0 above upper bound 1\.0"):
        weights(truncation="icepop", upper=1.0, lower=2.0)


def test_token_mult_prob_error_is_1_573():
    assert agreement_metrics(TRAIN, ROLLOUT)["token_mult_prob_error"].mean().item() == pytest.approx(1.573, abs=5e-4)


def test_gen_kl_error_is_k3_of_plus_1_and_policy_kl_error_k3_of_minus_1_over_3_tokens():
    found = agreement_metrics(TRAIN, ROLLOUT)
    assert found["gen_kl_error"].mean().item() == pytest.approx((math.e - 2) / 3, abs=1e-6)
    assert found["policy_kl_error"].mean().item() == pytest.approx(math.exp(-1) / 3, abs=1e-6)


def test_equal_log_probabilities_have_errors_0_0_0_and_factor_1():
    found = agreement_metrics(TRAIN, TRAIN.clone())
    assert {name: value.sum().item() for name, value in found.items()} == pytest.approx(
        {"gen_kl_error": 0, "policy_kl_error": 0, "js_divergence_error": 0, "token_mult_prob_error": 3}, abs=1e-7
    )


def test_gen_kl_estimate_over_a_million_samples_is_the_exact_divergence_to_1_percent():
    generation, train = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.4, 0.4, 0.2]).log()
    tokens = torch.multinomial(
        generation.exp(), 1_000_000, replacement=True, generator=torch.Generator().manual_seed(0)
    )
    exact = (generation.exp() * (generation - train)).sum().item()
    found = agreement_metrics(train[tokens], generation[tokens])["gen_kl_error"].mean().item()
    assert found == pytest.approx(exact, rel=0.01)


def test_threshold_1_5_masks_the_sequence_with_mean_error_1_573_and_keeps_the_exact_one():
    train, rollout = torch.cat([TRAIN, TRAIN]), torch.cat([ROLLOUT, TRAIN])
    ids, ones = torch.tensor([0, 0, 0, 1, 1, 1]), torch.ones(6)
    assert sequence_error_mask(train, rollout, ones, ids, 2, 1.5).tolist() == [0.0, 1.0]
    assert sequence_error_mask(train, rollout, ones, ids, 2, 1.6).tolist() == [1.0, 1.0]
    assert sequence_error_mask(train, rollout, ones, ids, 2, None).tolist() == [1.0, 1.0]


def test_threshold_masks_nan_and_ignores_masked_tokens_and_empty_sequences():
    train, rollout = torch.tensor([math.nan, -1.0, -9.0]), torch.tensor([-1.0, -1.0, -1.0])
    mask, ids = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0, 2, 2])
    assert sequence_error_mask(train, rollout, mask, ids, 4, 1.1).tolist() == [0.0, 1.0, 1.0, 1.0]
