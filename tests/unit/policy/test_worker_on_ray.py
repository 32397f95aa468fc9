"""Guards against a trainer that works in plain processes but not in Ray actors, and weights that change on export."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nemo_rl_moe.cluster.ray_cluster import reserve_devices
from nemo_rl_moe.cluster.worker_group import WorkerGroup, WorkerSpec
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.policy.policy import Policy
from nemo_rl_moe.recipe.environment import worker_environment
from nemo_rl_moe.recipe.schema import Recipe
from nemo_rl_moe.refit.shared_memory import SharedBuffer
from tests.shared_ray import ensure_ray
from tests.unit.policy.local_workers import make_batch, make_recipe


@pytest.fixture(scope="module")
def started(moe_folder: Path, tmp_path_factory: pytest.TempPathFactory):
    """EP2 on two Ray actors: the policy and its workers."""
    plain = make_recipe(
        moe_folder,
        policy__megatron_cfg__expert_model_parallel_size=2,
        loss_fn__force_on_policy_ratio=True,
        cluster__gpus_per_node=2,
    )
    recipe = Recipe.model_validate(plain)
    ensure_ray()
    with reserve_devices(recipe.cluster) as placement:
        specs = [WorkerSpec(rank, 0.5, 0.0, (plain, rank, 2)) for rank in range(2)]
        workers = WorkerGroup(
            "policy",
            "nemo_rl_moe.policy.worker.PolicyWorker",
            specs,
            placement,
            worker_environment(recipe, "policy"),
            tmp_path_factory.mktemp("logs"),
        )
        policy = Policy(workers, recipe)
        policy.setup()
        yield policy, workers
        workers.kill()


@pytest.fixture(scope="module")
def ray_policy(started) -> Policy:
    return started[0]


def test_exported_weights_of_two_expert_parallel_actors_are_bit_equal_to_the_checkpoint(ray_policy, moe_folder):
    stored = load_file(moe_folder / "model.safetensors")
    layout = ray_policy.weight_layout()
    with SharedBuffer.create(layout.nbytes) as buffer:
        assert ray_policy.export_weights(str(buffer.path)) == layout.numel
        views = layout.views(buffer.tensor)
        assert set(views) == set(stored)
        assert all(torch.equal(views[name], stored[name]) for name in stored)
        del views


def test_saved_hugging_face_folder_is_bit_equal_to_the_checkpoint(ray_policy, moe_folder, tmp_path: Path):
    ray_policy.save_hf(str(tmp_path / "model"))
    stored, saved = (load_file(next(f.glob("*.safetensors"))) for f in (moe_folder, tmp_path / "model"))
    assert set(saved) == set(stored)
    assert all(torch.equal(saved[name], stored[name]) for name in stored)
    assert (tmp_path / "model" / "config.json").read_bytes() == (moe_folder / "config.json").read_bytes()


def test_actors_train_and_their_reference_stays(ray_policy, tmp_path: Path):
    batch = make_batch()
    before = ray_policy.logprobs(batch)
    reference = ray_policy.logprobs(batch, reference=True)
    assert np.array_equal(before, reference)
    metrics = ray_policy.train(batch.with_values({"reference_logprobs": reference}))
    assert metrics["skipped_steps"] == 0.0 and metrics["policy/num_optimizer_steps"] == 1.0
    assert 0.0 <= metrics["policy/padding_fraction"] < 0.5
    after = ray_policy.logprobs(batch)
    assert np.abs(after - before).max() > 0.01
    ray_policy.save(str(tmp_path / "policy"))
    ray_policy.train(batch.with_values({"reference_logprobs": reference}))
    ray_policy.load(str(tmp_path / "policy"))
    assert np.array_equal(ray_policy.logprobs(batch), after)


def test_nobody_can_take_the_port_of_the_ranks_store_between_its_choice_and_its_use(started) -> None:
    _, workers = started
    (host, first), (_, second) = (workers.call_rank(rank, "open_store", phase="p", timeout_s=60) for rank in (0, 1))
    assert first != second
    for port in (first, second):
        with socket.socket() as rival, pytest.raises(OSError, match="in use"):
            rival.bind((host, port))


def test_a_user_error_in_an_actor_reaches_the_driver_as_it_is(ray_policy, tmp_path: Path):
    with pytest.raises(UserError, match="not a trainer checkpoint"):
        ray_policy.load(str(tmp_path))
