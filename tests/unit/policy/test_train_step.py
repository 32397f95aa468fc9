"""Guards against a loss that depends on how the batch is split, on padding, or on what came before."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_rl_moe.batch import SequenceBatch
from nemo_rl_moe.policy.step_shard import count_loss_tokens
from tests.unit.policy.local_workers import LocalWorkers, make_batch, make_recipe

# Plain gradient descent with rate 1 and no clipping: the change of a weight is minus its gradient.
SGD = {
    "policy__megatron_cfg__optimizer": {
        "optimizer": "sgd",
        "lr": 1.0,
        "sgd_momentum": 0.0,
        "weight_decay": 0.0,
        "use_distributed_optimizer": False,
    },
    "policy__max_grad_norm": 0.0,
    "loss_fn__ratio_clip_min": 0.99,
    "loss_fn__ratio_clip_max": 50.0,
}
ON_POLICY = {"loss_fn__force_on_policy_ratio": True, "loss_fn__reference_policy_kl_penalty": 0.0}


def one_step(workers: LocalWorkers, model, batch: SequenceBatch | None = None, **overrides):
    """Loss, gradient by parameter name, and log-probabilities before the step."""
    policy = workers.policy(make_recipe(model, **SGD, **overrides))
    batch = make_batch() if batch is None else batch
    before = policy.logprobs(batch)
    weights = _parameters(workers)
    batch = batch.with_values({"prev_logprobs": before - 0.1, "reference_logprobs": before + 0.1})
    metrics = policy.train(batch)
    gradient = {name: weights[name] - value for name, value in _parameters(workers).items()}
    return metrics["loss"], gradient, before


def _parameters(workers: LocalWorkers) -> dict[str, np.ndarray]:
    return workers.call("parameters", phase="read", timeout_s=60)[0]


@pytest.fixture(scope="module")
def usual_step(solo, moe_folder):
    return one_step(solo, moe_folder)


PADDED = {"policy__sequence_packing__enabled": False}


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({"policy__train_micro_batch_size": 12, "policy__logprob_batch_size": 12}, id="one-packed-row"),
        pytest.param(PADDED, id="padded-2-rows"),
        pytest.param(PADDED | {"policy__train_micro_batch_size": 1, "policy__logprob_batch_size": 1}, id="one-by-one"),
        pytest.param(PADDED | {"policy__train_micro_batch_size": 12}, id="padded-12-rows"),
        pytest.param({"policy__make_sequence_length_divisible_by": 16}, id="packed-multiple-of-16"),
        pytest.param({"policy__megatron_cfg__activation_checkpointing": True}, id="recomputed-activations"),
    ],
)
def test_packed_padded_and_one_by_one_give_the_same_logprobs_loss_and_gradient_to_1e_5(
    solo, moe_folder, usual_step, overrides
):
    loss, gradient, before = one_step(solo, moe_folder, **overrides)
    expected_loss, expected_gradient, expected_before = usual_step
    assert np.abs(before - expected_before).max() < 1e-5
    assert abs(loss - expected_loss) < 1e-5
    assert max(np.abs(g).max() for g in expected_gradient.values()) > 0.05
    assert max(np.abs(gradient[n] - g).max() for n, g in expected_gradient.items()) < 1e-5


def test_two_data_parallel_ranks_give_the_same_gradient_to_1e_5(pair, moe_folder, usual_step):
    loss, gradient, _ = one_step(pair, moe_folder)
    assert abs(loss - usual_step[0]) < 1e-5
    assert max(np.abs(gradient[n] - g).max() for n, g in usual_step[1].items()) < 1e-5


@pytest.mark.parametrize("ranks", ["solo", "pair"])
def test_token_mean_of_2_tokens_at_loss_1_and_8_at_loss_0_is_0_2_not_0_5(request, moe_folder, ranks):
    batch = make_batch(n=2)
    lengths = np.array([4, 10])
    total = 14
    within = np.concatenate([np.arange(4), np.arange(10)])
    batch = SequenceBatch(
        lengths,
        np.arange(total, dtype=np.int32) + 7,
        within >= 2,
        {
            "generation_logprobs": np.zeros(total, dtype=np.float32),
            "advantages": np.repeat([-1.0, 0.0], lengths).astype(np.float32),
        },
    )
    policy = request.getfixturevalue(ranks).policy(
        make_recipe(moe_folder, **ON_POLICY, **PADDED, policy__train_micro_batch_size=1)
    )
    metrics = policy.train(batch)
    assert count_loss_tokens(batch).tokens == 10
    assert metrics["policy/num_microbatches"] == (2 if ranks == "solo" else 1)
    assert abs(metrics["loss"] - 0.2) < 1e-6


def test_a_batch_that_is_masked_out_gives_loss_0_and_gradient_0(solo, moe_folder):
    batch = make_batch().with_values(samples={"sample_mask": np.zeros(12, dtype=np.float32)})
    loss, gradient, _ = one_step(solo, moe_folder, batch)
    assert loss == 0.0
    assert all((g == 0).all() for g in gradient.values())


def test_momentum_of_two_steps_does_not_move_the_weights_in_a_masked_out_third(solo, moe_folder):
    policy = solo.policy(make_recipe(moe_folder, **ON_POLICY))
    for _ in range(2):
        policy.train(make_batch())
    before = _parameters(solo)
    metrics = policy.train(make_batch().with_values(samples={"sample_mask": np.zeros(12, dtype=np.float32)}))
    after = _parameters(solo)
    assert metrics["skipped_steps"] == 1.0
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_nan_advantage_skips_the_step_on_all_ranks_and_the_next_step_is_as_if_nothing_had_been(pair, moe_folder):
    recipe = make_recipe(moe_folder, **ON_POLICY)
    batch = make_batch()
    expected = pair.policy(recipe).train(batch)
    policy = pair.policy(recipe)
    broken = batch.token_values["advantages"].copy()
    broken[batch.offsets[5] :] = np.nan
    before = _parameters(pair)
    metrics = policy.train(batch.with_values({"advantages": broken}))
    assert metrics["skipped_steps"] == 1.0
    after = _parameters(pair)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    again = policy.train(batch)
    assert again["skipped_steps"] == 0.0
    assert again["loss"] == expected["loss"] and again["grad_norm"] == expected["grad_norm"]


def test_batch_of_12_with_global_batch_4_makes_3_optimizer_steps_and_learning_rate_warms_up(solo, moe_folder):
    policy = solo.policy(
        make_recipe(
            moe_folder,
            **ON_POLICY,
            policy__train_global_batch_size=4,
            policy__megatron_cfg__scheduler={
                "lr_decay_style": "linear",
                "lr_warmup_iters": 4,
                "lr_warmup_init": 0.0,
                "lr_decay_iters": 8,
            },
            policy__megatron_cfg__optimizer={"lr": 1e-3, "min_lr": 0.0},
        )
    )
    rates = [policy.train(make_batch()) for _ in range(3)]
    assert [m["policy/num_optimizer_steps"] for m in rates] == [3, 3, 3]
    # The rates of steps 3, 6 and 9, counted from 1: 2/4 of the peak, then 3/4 of the way down, then the end.
    assert [round(m["lr"], 9) for m in rates] == [0.5e-3, 0.75e-3, 0.0]


def test_reference_logprobs_stay_bit_equal_through_training_and_the_policy_is_restored_bit_equal(pair, moe_folder):
    policy = pair.policy(make_recipe(moe_folder, **ON_POLICY))
    batch = make_batch()
    start = policy.logprobs(batch)
    policy.train(batch)
    trained, weights = policy.logprobs(batch), _parameters(pair)
    assert np.abs(trained - start).max() > 0.01
    assert np.array_equal(policy.logprobs(batch, reference=True), start)
    restored = _parameters(pair)
    assert all(np.array_equal(weights[name], restored[name]) for name in weights)
    assert np.array_equal(policy.logprobs(batch), trained)


def test_frozen_router_keeps_its_weights_while_experts_move(solo, moe_folder):
    _, gradient, _ = one_step(solo, moe_folder, policy__megatron_cfg__freeze_moe_router=True)
    routers = [g for name, g in gradient.items() if "router" in name]
    assert len(routers) == 2 and all((g == 0).all() for g in routers)
    assert max(np.abs(g).max() for name, g in gradient.items() if "experts" in name) > 1e-4


def test_gradient_norm_is_reported_before_clipping_and_clipped_to_the_limit(solo, moe_folder):
    free = one_step(solo, moe_folder)[1]
    norm = np.sqrt(sum(float((g**2).sum()) for name, g in free.items() if not name.startswith("main.")))
    overrides = {**SGD, "policy__max_grad_norm": 0.5 * norm}
    policy = solo.policy(make_recipe(moe_folder, **overrides))
    before, batch = _parameters(solo), make_batch()
    logprobs = policy.logprobs(batch)
    batch = batch.with_values({"prev_logprobs": logprobs - 0.1, "reference_logprobs": logprobs + 0.1})
    metrics = policy.train(batch)
    moved = {n: before[n] - v for n, v in _parameters(solo).items() if not n.startswith("main.")}
    assert abs(metrics["grad_norm"] - norm) < 1e-4 * norm
    assert abs(np.sqrt(sum(float((g**2).sum()) for g in moved.values())) - 0.5 * norm) < 1e-3 * norm


def test_training_logprobs_divide_logits_by_the_sampling_temperature(solo, dense_folder):
    batch = make_batch(n=1)
    raw = solo.policy(make_recipe(dense_folder, policy__generation__temperature=1.0)).logprobs(batch)
    cold = solo.policy(make_recipe(dense_folder, policy__generation__temperature=0.5)).logprobs(batch)
    assert raw[0] == cold[0] == 0.0
    assert np.abs(cold[1:] - raw[1:] / 0.5).max() > 0.1, "log-probabilities must not simply be divided"
    assert np.abs(cold[1:] - raw[1:]).max() > 0.1


def test_bfloat16_trains_with_float32_main_weights(pair, moe_folder):
    policy = pair.policy(make_recipe(moe_folder, **ON_POLICY, policy__precision="bfloat16"))
    batch = make_batch()
    losses = [policy.train(batch)["loss"] for _ in range(3)]
    assert all(np.isfinite(losses))
    start = policy.logprobs(batch, reference=True)
    assert np.abs(policy.logprobs(batch) - start).max() > 0.05
