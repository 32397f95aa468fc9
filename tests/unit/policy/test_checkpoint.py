"""Guards against a resumed run that goes on from something else than what was saved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nemo_rl_moe.errors import UserError
from nemo_rl_moe.policy.worker import MEMORY_PEAK
from tests.unit.policy.local_workers import make_batch, make_recipe

CFG = "policy__megatron_cfg__"
COMMON = {
    "loss_fn__force_on_policy_ratio": True,
    "loss_fn__reference_policy_kl_penalty": 0.0,
    f"{CFG}scheduler": {"lr_decay_style": "cosine", "lr_warmup_iters": 2, "lr_decay_iters": 8},
}
EP2 = {f"{CFG}expert_model_parallel_size": 2}
PP2 = {f"{CFG}pipeline_model_parallel_size": 2}


def _go_on(policy, num_steps: int):
    """What the steps computed. What was measured on the way, as memory is, differs between equal runs."""
    steps = [policy.train(make_batch(seed=i)) for i in range(10, 10 + num_steps)]
    return [{name: value for name, value in step.items() if name != MEMORY_PEAK} for step in steps]


@pytest.fixture(scope="module")
def saved(pair, moe_folder, tmp_path_factory):
    """A checkpoint after three steps under DP2 and what came after it without a break."""
    folder = str(tmp_path_factory.mktemp("checkpoint") / "policy")
    policy = pair.policy(make_recipe(moe_folder, **COMMON))
    for i in range(3):
        policy.train(make_batch(seed=i))
    policy.save(folder)
    return folder, _go_on(policy, 2), policy.logprobs(make_batch())


def test_two_steps_after_loading_are_bit_equal_to_the_run_that_never_stopped(pair, moe_folder, saved):
    folder, expected, logprobs = saved
    policy = pair.policy(make_recipe(moe_folder, **COMMON))
    reference = policy.logprobs(make_batch())
    policy.load(folder)
    steps = _go_on(policy, 2)
    assert steps == expected
    assert np.array_equal(policy.logprobs(make_batch()), logprobs)
    assert np.array_equal(policy.logprobs(make_batch(), reference=True), reference), (
        "the reference is not the checkpoint"
    )


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        pytest.param("solo", {}, id="one-process"),
        pytest.param("pair", EP2, id="ep2"),
        pytest.param("pair", PP2, id="pp2"),
    ],
)
def test_a_checkpoint_of_dp2_goes_on_under_another_layout_to_1e_5(request, moe_folder, saved, ranks, overrides):
    folder, expected, _ = saved
    policy = request.getfixturevalue(ranks).policy(make_recipe(moe_folder, **COMMON, **overrides))
    policy.load(folder)
    for step, other in zip(_go_on(policy, 2), expected, strict=True):
        assert abs(step["loss"] - other["loss"]) < 1e-5
        assert step["lr"] == other["lr"]
        assert abs(step["grad_norm"] - other["grad_norm"]) < 1e-3


def test_a_checkpoint_of_another_model_is_refused_with_its_folder_named(pair, dense_folder, saved):
    policy = pair.policy(make_recipe(dense_folder, **COMMON))
    with pytest.raises(UserError, match=f"{saved[0]}: the checkpoint does not fit the model"):
        policy.load(saved[0])


def test_loading_from_a_folder_without_a_checkpoint_names_it(solo, dense_folder, tmp_path: Path):
    policy = solo.policy(make_recipe(dense_folder))
    with pytest.raises(UserError, match=f"{tmp_path}: not a trainer checkpoint"):
        policy.load(str(tmp_path))
