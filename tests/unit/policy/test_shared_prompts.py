"""Guards against a shared prompt that changes what is trained: log-probabilities, loss or gradient."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_moe.batch import SequenceBatch
from nemo_rl_moe.policy.megatron.microbatch import build_rows
from nemo_rl_moe.policy.packing import plan_microbatches
from nemo_rl_moe.policy.shared_prompts import find_families, split_families
from tests.unit.policy.local_workers import LocalWorkers, make_recipe
from tests.unit.policy.test_train_step import SGD

CFG = "policy__megatron_cfg__"
SHARED = {"policy__sequence_packing__share_prompts": True}


def group_batch(groups: list[tuple[int, list[int]]], seed: int = 0) -> SequenceBatch:
    """Groups of (prompt tokens, tokens of each response); samples are shuffled, advantages and engine values drawn."""
    rng = np.random.default_rng(seed)
    rows = [
        (prompt, np.concatenate([tokens, rng.integers(0, 256, size)]))
        for prompt, responses in groups
        for tokens in [rng.integers(0, 256, prompt)]
        for size in responses
    ]
    rows = [rows[i] for i in rng.permutation(len(rows))]
    lengths = np.array([len(tokens) for _, tokens in rows], dtype=np.int64)
    total = int(lengths.sum())
    return SequenceBatch(
        lengths,
        np.concatenate([tokens for _, tokens in rows]).astype(np.int32),
        np.concatenate([np.arange(len(tokens)) >= prompt for prompt, tokens in rows]),
        {
            "generation_logprobs": rng.normal(-5.5, 0.3, total).astype(np.float32),
            "advantages": np.repeat(rng.normal(size=len(rows)), lengths).astype(np.float32),
        },
        {"sample_mask": np.ones(len(rows), dtype=np.float32)},
    )


GROUPS = st.lists(
    st.tuples(st.integers(0, 20), st.lists(st.integers(1, 20), min_size=1, max_size=6)), min_size=1, max_size=6
)


@settings(max_examples=150, deadline=None)
@given(GROUPS, st.integers(1, 4), st.sampled_from([1, 4]), st.booleans())
def test_every_sampled_token_is_planned_once_with_its_own_predecessor_in_no_more_tokens_than_alone(
    groups, dp, multiple, same
):
    batch = group_batch(groups)
    families = find_families(batch)
    plan = plan_microbatches(
        batch.lengths, dp=dp, packed=True, max_tokens=64, divisible_by=multiple, same_shape=same, families=families
    )
    seen = np.zeros(len(batch.tokens), dtype=int)
    before = np.concatenate([[-1], batch.tokens[:-1]])
    within = np.arange(len(batch.tokens)) - np.repeat(batch.offsets[:-1], batch.lengths)
    computed = 0
    assert {len(rank) for rank in plan.ranks} == {plan.num_microbatches}
    for rank in range(dp):
        shard, origin = plan.shard(batch, rank), batch.token_index(plan.rank_samples(rank))
        for m in shard.microbatches:
            rows = build_rows(shard.batch, m, shard.batch.token_mask, "cpu")
            index = origin[rows.token_index.numpy()]
            seen[index] += 1
            assert m.row_length <= 64
            assert m.row_length % multiple == 0
            assert np.array_equal(rows.tokens.reshape(-1)[rows.sources].numpy(), before[index])
            assert np.array_equal(rows.position_ids.reshape(-1)[rows.sources].numpy(), within[index] - 1)
            assert np.array_equal(rows.targets.numpy(), batch.tokens[index])
            computed += sum(prompt + sum(responses) for prompt, responses in rows.families)
    assert np.array_equal(seen, batch.token_mask & (within > 0))
    assert computed == plan.num_tokens <= batch.lengths.sum()
    assert plan.num_tokens <= plan.num_slots


def test_8_responses_of_32_tokens_to_a_prompt_of_64_are_320_tokens_and_not_768():
    batch = group_batch([(64, [32] * 8)])
    (family,) = find_families(batch)
    assert family.num_tokens(batch.lengths) == 320
    halves = split_families([family], batch.lengths, budget=200, at_least=1)
    assert sorted(f.num_tokens(batch.lengths) for f in halves) == [192, 192]
    assert len(split_families([family], batch.lengths, budget=1000, at_least=3)) == 3
    plan = plan_microbatches(batch.lengths, dp=1, packed=True, max_tokens=400, divisible_by=50, families=[family])
    assert (plan.num_tokens, plan.num_slots) == (320, 350)


def test_equal_prompts_are_one_family_and_a_sequence_without_a_sampled_token_is_alone():
    tokens = np.array([1, 2, 7, 1, 2, 8, 1, 3, 7, 1, 2], dtype=np.int32)
    mask = np.array([0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0], dtype=bool)
    families = find_families(SequenceBatch(np.array([3, 3, 3, 2]), tokens, mask))
    assert [(f.samples, f.prompt) for f in families] == [((0, 1), 2), ((2,), 2), ((3,), 0)]


MIXED = [(9, [1, 12, 5, 12]), (3, [20, 2]), (14, [7]), (6, [1, 1, 1, 18]), (11, [4])]


def one_step(workers: LocalWorkers, model, **overrides):
    """Log-probabilities, loss, and gradient by parameter name."""
    policy = workers.policy(make_recipe(model, **SGD, **overrides))
    batch = group_batch(MIXED)
    before = policy.logprobs(batch)
    weights = workers.call("parameters", phase="read", timeout_s=60)[0]
    batch = batch.with_values({"prev_logprobs": before - 0.1, "reference_logprobs": before + 0.1})
    metrics = policy.train(batch)
    assert 0.0 <= metrics["policy/padding_fraction"] < 1.0
    after = workers.call("parameters", phase="read", timeout_s=60)[0]
    return before, metrics["loss"], {name: weights[name] - after[name] for name in weights}


@pytest.fixture(scope="module")
def plain(solo, moe_folder, dense_folder):
    return {"moe": one_step(solo, moe_folder), "dense": one_step(solo, dense_folder)}


@pytest.mark.parametrize("budget", [48, 200])
@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_shared_prompts_give_the_logprobs_loss_and_gradient_of_sequences_alone_to_1e_5(
    solo, plain, moe_folder, dense_folder, kind, budget
):
    sizes = {f"policy__sequence_packing__{kind}_mb_tokens": budget for kind in ("train", "logprob")}
    before, loss, gradient = one_step(solo, moe_folder if kind == "moe" else dense_folder, **SHARED, **sizes)
    assert np.abs(before - plain[kind][0]).max() <= 1e-5
    assert loss == pytest.approx(plain[kind][1], abs=1e-5)
    for name, value in plain[kind][2].items():
        assert np.abs(gradient[name] - value).max() <= 1e-5, name


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({f"{CFG}expert_model_parallel_size": 2}, id="ep2"),
        pytest.param({f"{CFG}pipeline_model_parallel_size": 2}, id="pp2"),
        pytest.param(
            {
                f"{CFG}tensor_model_parallel_size": 2,
                f"{CFG}sequence_parallel": True,
                f"{CFG}expert_model_parallel_size": 2,
            },
            id="tp2-ep2",
        ),
    ],
)
def test_shared_prompts_on_two_ranks_give_the_logprobs_and_loss_of_one_process_to_1e_5(
    pair, plain, moe_folder, overrides
):
    before, loss, _ = one_step(pair, moe_folder, **SHARED, **overrides)
    assert np.abs(before - plain["moe"][0]).max() <= 1e-5
    assert loss == pytest.approx(plain["moe"][1], abs=1e-5)
