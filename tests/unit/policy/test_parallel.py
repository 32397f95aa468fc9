"""Guards against parallel layouts that train something else: experts that drift apart, gradients averaged twice."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.policy.local_workers import LocalWorkers, make_batch, make_recipe

CFG = "policy__megatron_cfg__"
EP2 = {f"{CFG}expert_model_parallel_size": 2}
PP2 = {f"{CFG}pipeline_model_parallel_size": 2}
TP2 = {f"{CFG}tensor_model_parallel_size": 2, f"{CFG}sequence_parallel": True}
ETP2 = {f"{CFG}expert_tensor_parallel_size": 2}
ALLGATHER = {f"{CFG}moe_token_dispatcher_type": "allgather"}
OVERLAP = {
    f"{CFG}distributed_data_parallel_config__overlap_grad_reduce": True,
    f"{CFG}distributed_data_parallel_config__overlap_param_gather": True,
}
# Wide clips: with the usual ones the loss is flat after two steps, and six equal losses would show nothing.
LOSS = {"loss_fn__ratio_clip_min": 0.99, "loss_fn__ratio_clip_max": 50.0}


def six_steps(workers: LocalWorkers, model, **overrides) -> tuple[np.ndarray, np.ndarray, list[float], np.ndarray]:
    """Log-probabilities before, six losses, first gradient norm, and log-probabilities after."""
    policy = workers.policy(make_recipe(model, **LOSS, **overrides))
    batch = make_batch()
    before, reference = policy.logprobs(batch), policy.logprobs(batch, reference=True)
    assert np.array_equal(before, reference)
    batch = batch.with_values({"prev_logprobs": before, "reference_logprobs": reference})
    steps = [policy.train(batch) for _ in range(6)]
    assert all(m["skipped_steps"] == 0 for m in steps)
    return before, np.array([m["loss"] for m in steps]), steps[0]["grad_norm"], policy.logprobs(batch)


@pytest.fixture(scope="module")
def one_process(solo, moe_folder, dense_folder):
    return {"moe": six_steps(solo, moe_folder), "dense": six_steps(solo, dense_folder)}


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        pytest.param("moe", {}, id="moe-dp2"),
        pytest.param("moe", OVERLAP, id="moe-dp2-overlap"),
        pytest.param("moe", {f"{CFG}optimizer__use_distributed_optimizer": False}, id="moe-dp2-plain-optimizer"),
        pytest.param("moe", EP2, id="moe-ep2"),
        pytest.param("moe", EP2 | ALLGATHER, id="moe-ep2-allgather"),
        pytest.param("moe", PP2, id="moe-pp2-unequal-packed"),
        pytest.param("moe", PP2 | {"policy__sequence_packing__enabled": False}, id="moe-pp2-padded"),
        pytest.param("moe", TP2 | EP2, id="moe-tp2-ep2"),
        pytest.param("moe", TP2 | ETP2, id="moe-tp2-etp2"),
        pytest.param("dense", {}, id="dense-tied-dp2"),
        pytest.param("dense", PP2, id="dense-tied-pp2"),
        pytest.param("dense", TP2, id="dense-tied-tp2"),
    ],
)
def test_six_training_steps_on_two_ranks_match_one_process_to_2e_5(
    pair, one_process, moe_folder, dense_folder, kind, overrides
):
    _check(six_steps(pair, moe_folder if kind == "moe" else dense_folder, **overrides), one_process[kind])


@pytest.mark.parametrize(
    "overrides",
    [
        # Experts are copied over fewer ranks than dense weights are: edp 1, dp 2.
        pytest.param(TP2 | EP2, id="tp2-ep2-dp2"),
        pytest.param(TP2 | EP2 | PP2, id="tp2-ep2-pp2"),
        # Experts are copied, edp 2.
        pytest.param(EP2 | OVERLAP, id="ep2-dp4-overlap"),
    ],
)
def test_six_training_steps_on_four_ranks_match_one_process_to_2e_5(quartet, one_process, moe_folder, overrides):
    _check(six_steps(quartet, moe_folder, **overrides), one_process["moe"])


def _check(found, expected) -> None:
    before, losses, norm, after = found
    expected_before, expected_losses, expected_norm, expected_after = expected
    assert len({round(float(x), 3) for x in expected_losses}) == 6, (
        "the losses must move for this test to mean anything"
    )
    assert np.abs(before - expected_before).max() < 1e-5
    assert abs(norm - expected_norm) < 1e-5 * expected_norm
    assert np.abs(losses - expected_losses).max() < 2e-5
    assert np.abs(after - expected_after).max() < 5e-5
