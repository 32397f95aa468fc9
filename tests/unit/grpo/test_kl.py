"""Risk guarded: an overflowing KL term turns one odd token into NaN weights."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from nemo_rl_moe.grpo.kl import k3, kl_estimate
from tests.unit.grpo import reference

KINDS = ["k1", "k2", "k3"]
CLAMPS = [(None, None), (20.0, 10.0), (20.0, None), (None, 10.0)]
EXTREMES = [-1e5, -1e4, -89.0, -25.0, -1e-6, 0.0, 1e-6, 19.0, 25.0, 88.0, 89.0, 1e4, 1e5]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("x", [-5.0, -0.3, 0.0, 0.02, 1.0, 4.0])
def test_estimators_equal_the_formula_to_1e_12_in_float64(kind, x):
    policy = torch.tensor([-6.0], dtype=torch.float64)
    found = kl_estimate(policy, policy + x, kind)
    assert found.item() == pytest.approx(reference.kl(-6.0, -6.0 + x, kind), abs=1e-12)


def test_probabilities_0_5_and_0_25_have_k1_0_693_k2_0_240_k3_0_193():
    p, q = torch.tensor(math.log(0.5)), torch.tensor(math.log(0.25))
    assert kl_estimate(p, q, "k1").item() == pytest.approx(0.693147, abs=1e-6)
    assert kl_estimate(p, q, "k2").item() == pytest.approx(0.240227, abs=1e-6)
    assert kl_estimate(p, q, "k3").item() == pytest.approx(0.5 - 1 + 0.693147, abs=1e-6)


@pytest.mark.parametrize(("kind", "clamps", "x"), itertools.product(KINDS, CLAMPS, EXTREMES))
def test_value_and_gradient_are_finite_in_float32_for_log_ratios_up_to_1e5(kind, clamps, x):
    policy = torch.tensor([-1.0], requires_grad=True)
    estimate = kl_estimate(policy, policy.detach() + x, kind, *clamps)
    estimate.sum().backward()
    assert math.isfinite(estimate.item())
    assert math.isfinite(policy.grad.item())
    if kind != "k1":
        assert estimate.item() >= 0


@pytest.mark.parametrize("x", [19.9, 20.1, 50.0, 1e4])
def test_unclamped_k3_pulls_the_policy_up_to_a_reference_that_is_e_to_the_x_more_likely(x):
    policy = torch.tensor([-2e4], requires_grad=True)
    kl_estimate(policy, policy.detach() + x, "k3").sum().backward()
    assert policy.grad.item() == pytest.approx(-math.expm1(min(x, 20.0)), rel=1e-2)


def test_k3_is_continuous_with_its_gradient_at_20():
    x = torch.tensor([20 - 1e-9, 20 + 1e-9], dtype=torch.float64, requires_grad=True)
    values = k3(x)
    (slopes,) = torch.autograd.grad(values.sum(), x)
    assert values[0].item() == pytest.approx(values[1].item(), rel=1e-8)
    assert slopes[0].item() == pytest.approx(slopes[1].item(), rel=1e-8)


def test_k3_of_a_difference_of_1e_4_is_5e_9_in_float32_and_not_rounding_noise():
    assert k3(torch.tensor(1e-4)).item() == pytest.approx(5e-9, rel=0.01)
    assert k3(torch.tensor(-1e-4)).item() == pytest.approx(5e-9, rel=0.01)


def test_clamped_tokens_have_value_at_the_clamp_and_gradient_0():
    policy = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    estimate = kl_estimate(policy, policy.detach() + torch.tensor([30.0, 3.0, -30.0]), "k3", 20.0, 10.0)
    estimate.sum().backward()
    assert estimate.tolist() == [10.0, 10.0, 10.0]
    assert policy.grad.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clamps", CLAMPS)
def test_gradients_equal_finite_differences_in_float64(kind, clamps):
    policy = torch.tensor([-3.0, -0.5, -1.2, -7.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-2.5, -0.4, -2.9, -1.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda p: kl_estimate(p, ref, kind, *clamps), policy)


def test_an_unknown_estimator_is_an_error_naming_it():
    with pytest.raises(ValueError, match="'k4'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
