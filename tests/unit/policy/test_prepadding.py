"""Guards against HybridEP's silent needs: one row length on all ranks of an expert group, and pads that go nowhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nemo_rl_moe.batch import SequenceBatch
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.policy.packing import Microbatch, RankShard
from nemo_rl_moe.policy.policy import needs_same_shape
from nemo_rl_moe.recipe.hybrid_ep import prepad_multiple
from nemo_rl_moe.recipe.schema.policy import MegatronConfig
from tests.unit.policy.local_workers import make_recipe

CFG = "policy__megatron_cfg__"
PREPAD = {f"{CFG}moe_hybridep_prepad_packed_inputs": True}
EP2 = {f"{CFG}expert_model_parallel_size": 2}
TP2 = {f"{CFG}tensor_model_parallel_size": 2, f"{CFG}sequence_parallel": True}
LONG = {
    "policy__max_total_sequence_length": 640,
    "policy__train_micro_batch_size": 1,
    "policy__logprob_batch_size": 1,
    "policy__train_global_batch_size": 2,
    "loss_fn__force_on_policy_ratio": True,
    "loss_fn__reference_policy_kl_penalty": 0.0,
}


def two_sequences() -> SequenceBatch:
    """517 and 502 tokens."""
    rng = np.random.default_rng(5)
    lengths = np.array([517, 502])
    total = int(lengths.sum())
    within = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return SequenceBatch(
        lengths,
        rng.integers(0, 256, total).astype(np.int32),
        within >= 3,
        {
            "generation_logprobs": rng.normal(-5.5, 0.3, total).astype(np.float32),
            "advantages": np.repeat(np.array([1.0, -0.5]), lengths).astype(np.float32),
        },
        {"sample_mask": np.ones(2, dtype=np.float32)},
    )


def run(workers, model, **overrides):
    """Log-probabilities, routing of that pass by rank and layer, and the metrics of a training step."""
    policy = workers.policy(make_recipe(model, **LONG, **overrides))
    workers.call("watch_routing", phase="watch", timeout_s=60)
    batch = two_sequences()
    logprobs = policy.logprobs(batch)
    routing = workers.call("routing", phase="read", timeout_s=60)
    return logprobs, routing, policy.train(batch)


@pytest.fixture(scope="module")
def unpadded(pair, moe_folder):
    return run(pair, moe_folder, **EP2)


def test_517_and_502_tokens_become_640_on_both_ranks_and_pads_reach_no_expert(pair, moe_folder, unpadded):
    logprobs, routing, metrics = run(pair, moe_folder, **EP2, **PREPAD)
    for tokens, layers in zip((517, 502), routing, strict=True):
        assert len(layers) == 2
        for layer in layers:
            assert layer["slots"] == 640
            # Pads are behind the tokens of the row; each token has its 2 experts and no pad has one.
            assert np.array_equal(layer["pads"], np.arange(640) >= tokens)
            assert np.array_equal(layer["routes"], np.where(layer["pads"], 0, 2))
    expected, before, expected_metrics = unpadded
    assert [layer["slots"] for layers in before for layer in layers] == [517, 517, 502, 502]
    assert np.abs(expected).max() > 1
    assert np.abs(logprobs - expected).max() < 1e-5
    assert abs(metrics["loss"] - expected_metrics["loss"]) < 1e-5
    assert abs(metrics["grad_norm"] / expected_metrics["grad_norm"] - 1) < 1e-5
    assert metrics["policy/padding_fraction"] == pytest.approx(1 - 1019 / 1280)
    assert expected_metrics["policy/padding_fraction"] == 0


def test_under_tp2_with_sp_rows_are_multiples_of_256_and_each_rank_masks_its_own_pads(pair, moe_folder, unpadded):
    logprobs, routing, _ = run(pair, moe_folder, **EP2, **TP2, **PREPAD)
    assert np.abs(logprobs - unpadded[0]).max() < 1e-5
    for rank, layers in enumerate(routing):
        # One data-parallel rank, so each row is rounded up by itself: 517 tokens to 768, 502 to 512.
        for layer, (tokens, row) in zip(layers, [(517, 768)] * 2 + [(502, 512)] * 2, strict=True):
            slots = np.arange(row).reshape(2, -1)[rank]
            assert np.array_equal(layer["pads"], slots >= tokens)
            assert np.array_equal(layer["routes"], np.where(layer["pads"], 0, 2))


def shard_of(length: int) -> RankShard:
    batch = SequenceBatch(np.array([length]), np.zeros(length, dtype=np.int32), np.ones(length, dtype=bool))
    return RankShard(batch, (Microbatch((0,), 1, length, packed=True),))


def row_lengths(join, megatron, lengths):
    """Row lengths after the ranks have agreed, or the error."""
    from nemo_rl_moe.policy.megatron.prepadding import EqualRows

    cfg = MegatronConfig.model_validate(megatron)
    rank = join(cfg).rank
    try:
        shard = EqualRows(cfg).apply(shard_of(lengths[rank]), torch.device("cpu"))
    except UserError as error:
        return str(error)
    return shard.microbatches[0].row_length


FLEX = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}


def test_517_and_502_tokens_become_1024_under_cp2_and_tp2_with_sp(four_ranks):
    megatron = {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "context_parallel_size": 2,
        "expert_model_parallel_size": 4,
        "moe_hybridep_prepad_packed_inputs": True,
        **FLEX,
    }
    assert prepad_multiple(MegatronConfig.model_validate(megatron)) == 1024
    assert four_ranks.call(row_lengths, megatron, (517, 517, 502, 502)) == [1024] * 4


def test_only_ranks_of_one_expert_group_agree_on_a_length(four_ranks):
    megatron = {"expert_model_parallel_size": 2, "moe_hybridep_prepad_packed_inputs": True, **FLEX}
    assert four_ranks.call(row_lengths, megatron, (517, 502, 100, 129)) == [640, 640, 256, 256]


def test_hybrid_ep_without_prepadding_refuses_unequal_rows_on_every_rank_of_the_group(four_ranks):
    megatron = {"expert_model_parallel_size": 2, **FLEX}
    answers = four_ranks.call(row_lengths, megatron, (517, 502, 300, 300))
    assert answers[2:] == [300, 300]
    for text in answers[:2]:
        assert "micro-batch 0" in text and "502 to 517 tokens" in text
        assert "moe_hybridep_prepad_packed_inputs" in text


def test_the_plan_leaves_lengths_to_prepadding_and_makes_one_shape_without_it():
    flex = {"expert_model_parallel_size": 2, **FLEX}
    assert needs_same_shape(MegatronConfig.model_validate(flex))
    assert not needs_same_shape(MegatronConfig.model_validate(flex | {"moe_hybridep_prepad_packed_inputs": True}))
