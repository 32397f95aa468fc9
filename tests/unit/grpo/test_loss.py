"""Risk guarded: a loss with a wrong sign, mean or mask trains without complaint, only worse."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from nemo_rl_moe.grpo.loss import grpo_loss
from nemo_rl_moe.grpo.types import GlobalCounts, TokenBatch
from nemo_rl_moe.recipe.schema import LossConfig
from tests.unit.grpo import reference
from tests.unit.grpo.reference import Case, random_case

VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "clip-higher": {"ratio_clip_min": 0.1, "ratio_clip_max": 0.35},
    "dual clip": {"ratio_clip_c": 1.3},
    "sample means": {"token_level_loss": False},
    "gspo": {"token_level_loss": False, "sequence_level_importance_ratios": True},
    "gspo, tis, dual clip": {
        "token_level_loss": False,
        "sequence_level_importance_ratios": True,
        "ratio_clip_c": 1.2,
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "tis",
        "truncated_importance_sampling_ratio": 1.5,
    },
    "on-policy": {"force_on_policy_ratio": True, "use_importance_sampling_correction": True},
    "no KL": {"reference_policy_kl_penalty": 0.0},
    "k1": {"reference_policy_kl_type": "k1", "reference_policy_kl_penalty": 0.3},
    "k2 clamped": {
        "reference_policy_kl_type": "k2",
        "reference_policy_kl_penalty": 0.3,
        "kl_input_clamp_value": 0.5,
        "kl_output_clamp_value": 0.05,
    },
    "k3 unclamped": {
        "reference_policy_kl_penalty": 0.3,
        "kl_input_clamp_value": None,
        "kl_output_clamp_value": None,
    },
    "correction": {"use_importance_sampling_correction": True},
    "tis": {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "tis",
        "truncated_importance_sampling_ratio": 1.2,
    },
    "icepop": {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "icepop",
        "truncated_importance_sampling_ratio": 1.3,
        "truncated_importance_sampling_ratio_min": 0.8,
    },
    "seq-mask-tis": {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "seq-mask-tis",
        "truncated_importance_sampling_ratio": 1.1,
        "truncated_importance_sampling_ratio_min": 0.9,
        "token_level_loss": False,
    },
}


def run(config: dict[str, Any], case: Case, dtype: torch.dtype = torch.float64) -> tuple[dict[str, float], np.ndarray]:
    """Metrics and d loss / d logprobs of the whole case as one micro-batch."""
    batch = case.batch(dtype)
    loss, metrics = grpo_loss(LossConfig(**config), batch, case.counts)
    loss.backward()
    assert torch.equal(loss.detach().nan_to_num(7.0), metrics["loss"].nan_to_num(7.0))
    assert not any(value.requires_grad for value in metrics.values())
    return {name: value.item() for name, value in metrics.items()}, batch.logprobs.grad.numpy().astype(np.float64)


def full(config: dict[str, Any]) -> dict[str, Any]:
    return LossConfig(**config).model_dump()


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_all_12_metrics_equal_a_float64_loop_to_1e_10_for_10_draws(name):
    for seed in range(10):
        case = random_case(seed)
        expected = reference.loss(case, full(VARIANTS[name]))
        found, _ = run(VARIANTS[name], case)
        assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("name", VARIANTS)
def test_float32_loss_and_metrics_are_within_2e_5_of_the_float64_loop(name):
    case = random_case(3)
    expected = reference.loss(case, full(VARIANTS[name]))
    found, _ = run(VARIANTS[name], case, torch.float32)
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=2e-5, abs=2e-6)


@pytest.mark.parametrize("name", [n for n in VARIANTS if n != "on-policy"])
def test_gradient_equals_central_differences_of_the_loop_to_1e_6(name):
    case = random_case(11)
    _, gradient = run(VARIANTS[name], case)
    step = 1e-6
    for t in range(len(gradient)):
        up, down = case.logprobs.copy(), case.logprobs.copy()
        up[t] += step
        down[t] -= step
        config = full(VARIANTS[name])
        slope = (reference.loss(case, config, up)["loss"] - reference.loss(case, config, down)["loss"]) / (2 * step)
        assert gradient[t] == pytest.approx(slope, abs=1e-6)


def test_forced_on_policy_ratio_is_1_with_gradient_minus_a_w_over_5_and_needs_no_previous_logprobs():
    case = random_case(5)
    batch = case.batch()
    config = LossConfig(**VARIANTS["on-policy"], reference_policy_kl_penalty=0.0)
    without = TokenBatch(**{**batch.__dict__, "prev_logprobs": None, "reference_logprobs": None})
    loss, metrics = grpo_loss(config, without, GlobalCounts(5.0, 5.0))
    loss.backward()
    weights = np.exp(case.logprobs - case.generation)
    assert batch.logprobs.grad.numpy() == pytest.approx(-case.advantages * weights * case.mask / 5.0)
    assert metrics["probs_ratio"].item() == pytest.approx(case.mask.sum() / 5.0)
    assert metrics["clip_fraction"].item() == 0.0


def test_forced_on_policy_ratio_gives_the_gradient_of_equal_previous_logprobs():
    case = random_case(6)
    case.prev = case.logprobs.copy()
    _, forced = run({"force_on_policy_ratio": True}, case)
    _, plain = run({}, case)
    assert forced == pytest.approx(plain, abs=1e-15)


def one_token(ratio: float, advantage: float, **config: Any) -> tuple[float, float]:
    """Loss and gradient of a single token with this ratio, without KL."""
    logprobs = torch.tensor([-1.0 + math.log(ratio)], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.0], dtype=torch.float64)
    advantages, mask = torch.full_like(old, advantage), torch.ones_like(old)
    batch = TokenBatch(logprobs, old, old, None, advantages, mask, torch.zeros(1, dtype=torch.int64), 1)
    loss, _ = grpo_loss(LossConfig(reference_policy_kl_penalty=0.0, **config), batch, GlobalCounts(1, 1))
    loss.backward()
    return loss.item(), logprobs.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.1, 2.0, -2.2, -2.2),  # inside
        (1.5, 2.0, -2.56, 0.0),  # above 1.28, better than before: clipped
        (1.5, -2.0, 3.0, 3.0),  # above, worse than before: not clipped
        (0.5, -2.0, 1.6, 0.0),  # below 0.8, less likely as wanted: clipped
        (0.5, 2.0, -1.0, -1.0),  # below, to be made more likely: not clipped
        (9.0, -2.0, 6.0, 0.0),  # dual clip: at most 2 * 3
        (9.0, 0.0, 0.0, 0.0),
    ],
)
def test_clip_0_2_low_0_28_high_3_dual_gives_the_known_loss_and_gradient(ratio, advantage, loss, gradient):
    found = one_token(ratio, advantage, ratio_clip_min=0.2, ratio_clip_max=0.28, ratio_clip_c=3.0)
    assert found == pytest.approx((loss, gradient))


def test_without_dual_clip_ratio_9_and_advantage_minus_2_cost_18():
    assert one_token(9.0, -2.0) == pytest.approx((18.0, 18.0))


def test_gspo_takes_the_geometric_mean_of_ratios_4_and_1_which_is_2():
    logprobs = torch.tensor([math.log(4) - 3, -1.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-3.0, -1.0], dtype=torch.float64)
    batch = TokenBatch(
        logprobs, old, old, None, -torch.ones(2).double(), torch.ones(2).double(), torch.zeros(2).long(), 1
    )
    config = LossConfig(token_level_loss=False, sequence_level_importance_ratios=True, reference_policy_kl_penalty=0.0)
    loss, metrics = grpo_loss(config, batch, GlobalCounts(2, 1))
    loss.backward()
    assert loss.item() == pytest.approx(2.0)
    assert metrics["probs_ratio_max"].item() == metrics["probs_ratio_min"].item() == pytest.approx(2.0)
    # d s / d log p_t = s / |y|: the sequence's ratio is shared out over its tokens.
    assert logprobs.grad.tolist() == pytest.approx([1.0, 1.0])


def test_extremes_are_those_of_counting_tokens_only():
    case = random_case(2)
    found, _ = run({}, case)
    ratios = np.exp(case.logprobs - case.prev)[case.mask > 0]
    assert found["probs_ratio_max"] == pytest.approx(ratios.max())
    assert found["probs_ratio_min"] == pytest.approx(ratios.min())


def test_exact_entropy_is_used_when_given():
    batch = TokenBatch(**{**random_case(1).batch().__dict__, "entropy": torch.full((20,), 0.7, dtype=torch.float64)})
    _, metrics = grpo_loss(LossConfig(), batch, random_case(1).counts)
    assert metrics["approx_entropy"].item() == pytest.approx(0.7)


@pytest.mark.parametrize("name", VARIANTS)
def test_garbage_at_masked_tokens_changes_neither_loss_nor_metrics_nor_gradient(name):
    case = random_case(4)
    expected, expected_gradient = run(VARIANTS[name], case)
    off = case.mask == 0
    for values, junk in zip(
        (case.logprobs, case.prev, case.generation, case.reference, case.advantages),
        (-np.inf, np.nan, 1e30, np.inf, np.nan),
        strict=True,
    ):
        values[off] = junk
    found, gradient = run(VARIANTS[name], case)
    assert found == expected
    assert gradient.tolist() == expected_gradient.tolist()
    assert (gradient[off] == 0).all()


@pytest.mark.parametrize("name", VARIANTS)
def test_an_all_masked_batch_has_loss_0_gradient_0_and_finite_metrics(name):
    case = random_case(4)
    case.mask[:] = 0
    found, gradient = run(VARIANTS[name], case, torch.float32)
    assert found["loss"] == 0.0
    assert (gradient == 0).all()
    assert all(math.isfinite(value) for value in found.values())
    assert found["empty_microbatches"] == 1.0


@pytest.mark.parametrize("name", VARIANTS)
def test_a_micro_batch_of_0_tokens_has_loss_0_and_a_gradient_of_no_elements(name):
    case = random_case(4)
    batch = case.batch(torch.float32, np.zeros(0, dtype=np.int64))
    loss, metrics = grpo_loss(LossConfig(**VARIANTS[name]), batch, GlobalCounts(8, 2))
    loss.backward()
    assert loss.item() == 0.0
    assert batch.logprobs.grad.shape == (0,)
    assert metrics["empty_microbatches"].item() == 1.0


ODD = [-math.inf, -1e4, -200.0, -1.0, 0.0]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("clamped", [True, False])
def test_loss_gradient_and_metrics_are_finite_for_all_625_mixes_of_log_probabilities_down_to_minus_infinity(
    name, clamped
):
    mixes = np.array(list(itertools.product(ODD, repeat=4)))
    for advantage in (1.0, -1.0):
        case = Case(*mixes.T, np.full(625, advantage), np.ones(625), np.arange(625) // 5)
        clamps = {} if clamped else {"kl_input_clamp_value": None, "kl_output_clamp_value": None}
        found, gradient = run({**VARIANTS[name], **clamps}, case, torch.float32)
        assert all(math.isfinite(value) for value in found.values()), found
        assert np.isfinite(gradient).all()
        assert math.isfinite(float(np.float32(gradient @ gradient)))


def test_a_nan_log_probability_at_a_counting_token_shows_in_the_loss():
    case = random_case(4)
    case.logprobs[0] = np.nan
    found, _ = run({}, case)
    assert math.isnan(found["loss"])


def test_a_nan_from_the_generator_is_dropped_from_the_loss_by_its_weight_of_0():
    case = random_case(4)
    case.generation[0] = np.nan
    found, gradient = run({"use_importance_sampling_correction": True, "reference_policy_kl_penalty": 0.0}, case)
    assert math.isfinite(found["loss"])
    assert gradient[0] == 0.0
    assert found["importance_out_of_bounds"] == pytest.approx(1 / case.counts.tokens)


def test_missing_inputs_are_errors_naming_the_setting():
    batch = random_case(1).batch()
    no_prev = TokenBatch(**{**batch.__dict__, "prev_logprobs": None})
    with pytest.raises(ValueError, match="force_on_policy_ratio"):
        grpo_loss(LossConfig(), no_prev, GlobalCounts(1, 1))
    no_reference = TokenBatch(**{**batch.__dict__, "reference_logprobs": None})
    with pytest.raises(ValueError, match="reference_policy_kl_penalty"):
        grpo_loss(LossConfig(), no_reference, GlobalCounts(1, 1))


def test_without_reference_and_penalty_0_the_kl_metric_is_0():
    batch = TokenBatch(**{**random_case(1).batch().__dict__, "reference_logprobs": None})
    _, metrics = grpo_loss(LossConfig(reference_policy_kl_penalty=0.0), batch, random_case(1).counts)
    assert metrics["kl_penalty"].item() == 0.0


def test_a_dual_clip_of_1_is_refused_by_the_recipe():
    with pytest.raises(ValidationError):
        LossConfig(ratio_clip_c=1.0)
