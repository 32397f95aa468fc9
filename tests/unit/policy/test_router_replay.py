"""Guards against replay that is off by a token, a layer or a micro-batch: tokens then train in others' experts.

Risk: nothing crashes when routes are laid out wrongly, since every route is a valid one; only the loss is another.
"""

from __future__ import annotations

import numpy as np
import pytest

from nemo_rl_moe.batch import ROUTED_EXPERTS, SequenceBatch, route_dtype
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.policy.megatron.microbatch import scatter_records, token_slots
from nemo_rl_moe.policy.packing import Microbatch, RankShard
from nemo_rl_moe.policy.routes import RecordedRoutes, join_routes
from tests.unit.policy.local_workers import LocalWorkers, make_batch, make_recipe
from tests.unit.policy.test_shared_prompts import MIXED, SHARED, group_batch
from tests.unit.policy.test_train_step import PADDED, SGD

CFG = "policy__megatron_cfg__"
REPLAY = {"policy__router_replay__enabled": True}
LAYERS, EXPERTS, TOPK = 2, 8, 2


def drawn_routes(batch: SequenceBatch, missing: float = 0.1) -> np.ndarray:
    """int8 [T, 2, 2]: two different experts drawn for each token and layer, -1 for a share of the tokens.

    Drawn from the tokens up to each, so that sequences with one prompt have one route for it, as they would.
    """
    routes = np.empty((len(batch.tokens), LAYERS, TOPK), dtype=np.int8)
    for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        for i in range(start, end):
            rng = np.random.default_rng(batch.tokens[start : i + 1].astype(np.int64))
            routes[i] = -1 if rng.random() < missing else [rng.permutation(EXPERTS)[:TOPK] for _ in range(LAYERS)]
    return routes


def one_step(workers: LocalWorkers, model, batch: SequenceBatch, **overrides):
    """Log-probabilities, metrics and gradient by parameter name of a step under the batch's routes."""
    policy = workers.policy(make_recipe(model, **SGD, **REPLAY, **overrides))
    before = policy.logprobs(batch)
    weights = workers.call("parameters", phase="read", timeout_s=60)
    batch = batch.with_values({"prev_logprobs": before - 0.1, "reference_logprobs": before + 0.1})
    metrics = policy.train(batch)
    after = workers.call("parameters", phase="read", timeout_s=60)
    return before, metrics, {name: weights[0][name] - after[0][name] for name in weights[0]}


@pytest.fixture(scope="module")
def routed() -> SequenceBatch:
    batch = group_batch(MIXED)
    return batch.with_values({ROUTED_EXPERTS: drawn_routes(batch)})


@pytest.fixture(scope="module")
def alone(solo, moe_folder, routed):
    return one_step(solo, moe_folder, routed, **PADDED, policy__train_micro_batch_size=1, policy__logprob_batch_size=1)


LAYOUTS = [
    pytest.param("solo", {}, id="packed"),
    pytest.param("solo", PADDED, id="padded"),
    pytest.param("solo", {"policy__make_sequence_length_divisible_by": 16}, id="packed-multiple-of-16"),
    pytest.param("solo", SHARED, id="shared-prompts"),
    pytest.param("solo", {f"{CFG}activation_checkpointing": True}, id="recomputed"),
    pytest.param("solo", {f"{CFG}activation_checkpointing": True, **SHARED}, id="recomputed-shared-prompts"),
    pytest.param("pair", {}, id="dp2"),
    pytest.param("pair", {f"{CFG}expert_model_parallel_size": 2}, id="ep2"),
    pytest.param("pair", {f"{CFG}pipeline_model_parallel_size": 2}, id="pp2"),
    pytest.param(
        "pair",
        {f"{CFG}pipeline_model_parallel_size": 2, f"{CFG}activation_checkpointing": True, **SHARED},
        id="pp2-recomputed-shared-prompts",
    ),
    pytest.param(
        "pair",
        {
            f"{CFG}tensor_model_parallel_size": 2,
            f"{CFG}sequence_parallel": True,
            f"{CFG}expert_model_parallel_size": 2,
        },
        id="tp2-sp-ep2",
    ),
    pytest.param(
        "pair",
        {f"{CFG}expert_model_parallel_size": 2, f"{CFG}moe_hybridep_prepad_packed_inputs": True},
        id="ep2-prepadded",
    ),
]


@pytest.mark.parametrize(("ranks", "overrides"), LAYOUTS)
def test_replay_gives_the_logprobs_loss_and_gradient_norm_of_sequences_alone_to_1e_5_in_every_layout(
    request, moe_folder, routed, alone, ranks, overrides
):
    before, metrics, gradient = one_step(request.getfixturevalue(ranks), moe_folder, routed, **overrides)
    assert np.abs(before - alone[0]).max() <= 1e-5
    assert metrics["loss"] == pytest.approx(alone[1]["loss"], abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(alone[1]["grad_norm"], rel=1e-5)
    if ranks == "solo":
        assert all(np.abs(gradient[name] - value).max() <= 1e-5 for name, value in alone[2].items())
    # A shared prompt counts once, and without sharing once for each of its responses.
    if SHARED.keys().isdisjoint(overrides):
        assert metrics["router_agreement"] == pytest.approx(alone[1]["router_agreement"], abs=2e-3)


def test_routes_change_the_loss_and_gradients_reach_every_router(solo, moe_folder, routed, alone):
    bare = SequenceBatch(
        routed.lengths,
        routed.tokens,
        routed.token_mask,
        {name: v for name, v in routed.token_values.items() if name != ROUTED_EXPERTS},
        routed.sample_values,
    )
    before, metrics, _ = one_step(solo, moe_folder, bare)
    assert np.abs(before - alone[0]).max() > 0.05
    assert metrics["router_agreement"] == 1.0
    # Two experts drawn of eight are the router's own two in 1 of 28 cases.
    assert 0.0 < alone[1]["router_agreement"] < 0.15
    routers = {name: g for name, g in alone[2].items() if ".router." in name}
    assert len(routers) == LAYERS
    assert all(np.abs(g).max() > 1e-4 for g in routers.values())


@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("micro", [2, 12], ids=["several-micro-batches", "one-micro-batch"])
def test_the_training_forward_uses_exactly_the_recorded_experts(solo, moe_folder, recompute, micro):
    batch = make_batch()
    batch = batch.with_values({ROUTED_EXPERTS: drawn_routes(batch)})
    sizes = {"policy__train_micro_batch_size": micro, f"{CFG}activation_checkpointing": recompute}
    on_policy = {"loss_fn__force_on_policy_ratio": True, "loss_fn__reference_policy_kl_penalty": 0.0}
    policy = solo.policy(make_recipe(moe_folder, **REPLAY, **sizes, **on_policy))
    solo.call("watch_experts", phase="watch", timeout_s=60)
    policy.train(batch)
    (maps,) = solo.call("expert_maps", phase="read", timeout_s=60)
    plan = policy._plan(batch, training=True)
    assert (plan.num_microbatches > 1) == (micro == 2)
    times = 2 if recompute else 1
    assert len(maps) == LAYERS * plan.num_microbatches * times
    seen = {layer: [found for at, found in maps if at == layer] for layer in range(LAYERS)}
    if recompute:
        # Backward follows each forward at once, so a layer's maps come in pairs: first pass, second pass.
        for found in seen.values():
            assert all(np.array_equal(a, b) for a, b in zip(found[::2], found[1::2], strict=True))
            found[:] = found[::2]
    for number, microbatch in enumerate(plan.ranks[0]):
        index, slots = token_slots(batch, microbatch)
        routes = batch.token_values[ROUTED_EXPERTS][index]
        known = routes[:, 0, 0] >= 0
        assert 0 < known.sum() < len(known)
        for layer in range(LAYERS):
            found = seen[layer][number][slots]
            expected = np.zeros((len(index), EXPERTS), dtype=bool)
            np.put_along_axis(expected, routes[:, layer].astype(np.int64) % EXPERTS, True, axis=1)
            assert np.array_equal(found[known], expected[known])
            assert (found.sum(axis=1) == TOPK).all()


@pytest.mark.parametrize(("ranks", "overrides"), [p for p in LAYOUTS if "recomputed" not in str(p.id)])
def test_what_the_logprob_pass_records_is_what_it_would_choose_again_in_every_layout(
    request, moe_folder, ranks, overrides
):
    workers, batch = request.getfixturevalue(ranks), group_batch(MIXED)
    policy = workers.policy(make_recipe(moe_folder, **SGD, **REPLAY, **overrides))
    logprobs, routes = policy.logprobs_and_routes(batch)
    assert routes.shape == (len(batch.tokens), LAYERS, TOPK) and routes.dtype == np.int8
    assert routes.min() == 0 and routes.max() == EXPERTS - 1
    assert (routes[..., 0] != routes[..., 1]).all()
    batch = batch.with_values({ROUTED_EXPERTS: routes, "prev_logprobs": logprobs, "reference_logprobs": logprobs})
    assert np.abs(policy.logprobs(batch) - logprobs).max() <= 1e-5
    assert policy.train(batch)["router_agreement"] > 0.995


def test_replay_brings_the_logprobs_of_a_perturbed_router_closer_to_the_recorded_pass(solo, moe_folder):
    batch = make_batch(n=48)
    policy = solo.policy(make_recipe(moe_folder, **SGD, **REPLAY, policy__train_global_batch_size=48))
    logprobs, routes = policy.logprobs_and_routes(batch)
    routed = batch.with_values({ROUTED_EXPERTS: routes, "prev_logprobs": logprobs, "reference_logprobs": logprobs})
    # A change as another engine's rounding makes it: too small to matter but where two experts are nearly tied.
    solo.call("perturb_routers", 0.001, phase="perturb", timeout_s=60)
    own, replayed = (np.abs(policy.logprobs(b) - logprobs)[b.token_mask] for b in (batch, routed))
    assert own.max() > 0.1 and replayed.max() < 0.02
    assert replayed.mean() < 0.5 * own.mean()
    # The reference keeps its own experts: its weights are not perturbed, so it gives the first pass.
    assert np.abs(policy.logprobs(routed, reference=True) - logprobs).max() <= 1e-5
    assert 0.95 < policy.train(routed)["router_agreement"] < 1.0


def test_measure_only_trains_as_without_replay_and_logs_the_agreement(solo, moe_folder, routed):
    measured = one_step(solo, moe_folder, routed, policy__router_replay__measure_only=True)
    plain = solo.policy(make_recipe(moe_folder, **SGD))
    assert np.array_equal(measured[0], plain.logprobs(routed))
    assert 0.0 < measured[1]["router_agreement"] < 0.15
    batch = routed.with_values({"prev_logprobs": measured[0] - 0.1, "reference_logprobs": measured[0] + 0.1})
    metrics = plain.train(batch)
    assert metrics["loss"] == measured[1]["loss"] and "router_agreement" not in metrics


def test_replay_of_a_dense_model_and_routes_of_another_model_are_refused(solo, moe_folder, dense_folder):
    with pytest.raises(UserError, match=r"router_replay\.enabled: true, but the model has no experts"):
        solo.policy(make_recipe(dense_folder, **REPLAY))
    batch = make_batch()
    policy = solo.policy(make_recipe(moe_folder, **REPLAY))
    with pytest.raises(RuntimeError, match="3 layers and 2 experts a token, the model has 2 and 2"):
        policy.logprobs(batch.with_values({ROUTED_EXPERTS: np.zeros((len(batch.tokens), 3, 2), dtype=np.int8)}))


def test_128_experts_fit_one_byte_and_129_need_two():
    assert [route_dtype(n) for n in (8, 128, 129, 512)] == [np.int8, np.int8, np.int16, np.int16]


def test_ranks_of_two_stages_join_to_all_layers_and_a_dense_layer_has_none():
    stages = [
        (np.array([2, 0, 1]), RecordedRoutes((0,), 4, np.array([[[5, 6]], [[1, 2]], [[3, 4]]], dtype=np.int8))),
        (np.array([2, 0, 1]), RecordedRoutes((2, 3), 4, np.full((3, 2, 2), 7, dtype=np.int8))),
    ]
    joined = join_routes(3, stages)
    assert joined[:, 0].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert (joined[:, 1] == -1).all() and (joined[:, 2:] == 7).all()


def test_a_shared_prompt_gives_its_slots_to_each_of_its_sequences():
    batch = SequenceBatch(np.array([4, 3]), np.array([1, 2, 7, 8, 1, 2, 9], dtype=np.int32), np.ones(7, dtype=bool))
    microbatch = Microbatch((0, 1), 1, 8, packed=True, families=((2, 2),))
    index, slots = token_slots(batch, microbatch)
    assert dict(zip(index.tolist(), slots.tolist(), strict=True)) == {0: 0, 1: 1, 2: 2, 3: 3, 4: 0, 5: 1, 6: 4}
    torch = pytest.importorskip("torch")
    record = torch.arange(8, dtype=torch.int8).view(1, 8, 1, 1)
    assert scatter_records(RankShard(batch, (microbatch,)), [record]).flatten().tolist() == [0, 1, 2, 3, 0, 1, 4]
