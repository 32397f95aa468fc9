"""Sampling: right log-probabilities, draws that do not depend on the batch, ends, limits. Real vLLM on CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from nemo_rl_moe.errors import UserError
from nemo_rl_moe.generation.engine_worker import EngineUnusable, sample_seed
from nemo_rl_moe.generation.interface import Completions, SamplingSpec
from tests.unit.generation.engine_process import Engine
from tests.unit.generation.tiny_qwen import EOS_ID, make_model, random_prompts, worst_logprob_error

TOLERANCE = 5e-5


def rows(completions: Completions) -> list[list[int]]:
    """Token ids of each response."""
    return [r.tolist() for r in np.split(completions.token_ids, np.cumsum(completions.lengths)[:-1])]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_those_of_transformers_at_the_sampling_temperature_to_5e_5(
    engine: Engine, temperature: float
) -> None:
    model = make_model("moe", 11)
    engine.refit(model)
    prompts = random_prompts(8, seed=1)
    spec = SamplingSpec(temperature, 32, 2, seed=3)
    completions = engine.generate(prompts, spec)
    assert len(completions.lengths) == 16
    assert worst_logprob_error(model, prompts, completions, spec) <= TOLERANCE


def test_a_temperature_of_0_7_gives_other_logprobs_than_1_for_the_same_tokens(engine: Engine) -> None:
    model = make_model("moe", 11)
    engine.refit(model)
    prompts = random_prompts(4, seed=1)
    completions = engine.generate(prompts, SamplingSpec(0.7, 16, 1, seed=3))
    assert worst_logprob_error(model, prompts, completions, SamplingSpec(1.0, 16, 1, seed=3)) > 0.1


def test_same_seed_gives_the_same_draws_alone_and_in_a_batch_of_12(engine: Engine) -> None:
    prompts = random_prompts(12, seed=2)
    spec = SamplingSpec(1.0, 24, 3, seed=5)
    together = rows(engine.generate(prompts, spec))
    backwards = rows(engine.generate(prompts[::-1], spec, ids=list(range(12))[::-1]))
    for i in (0, 5, 11):
        alone = rows(engine.generate([prompts[i]], spec, ids=[i]))
        assert alone == together[3 * i : 3 * i + 3]
        assert alone == backwards[3 * (11 - i) : 3 * (11 - i) + 3]


def test_4800_prompt_tokens_at_once_give_the_draws_of_each_prompt_alone(engine: Engine) -> None:
    """More than the 4096 tokens of one step: vLLM on CPU cannot sample seeded requests whose prompt it cut in two."""
    prompts = random_prompts(40, seed=40, shortest=120, longest=120)
    spec = SamplingSpec(1.0, 6, 1, seed=5)
    together = rows(engine.generate(prompts, spec))
    for i in (0, 34, 39):
        assert rows(engine.generate([prompts[i]], spec, ids=[i])) == [together[i]]


def test_other_seeds_prompt_ids_and_response_numbers_give_other_draws(engine: Engine) -> None:
    prompt = random_prompts(1, seed=4)
    spec = SamplingSpec(1.0, 24, 4, seed=5)
    base = rows(engine.generate(prompt, spec))
    other_seed = rows(engine.generate(prompt, SamplingSpec(1.0, 24, 4, seed=6)))
    other_id = rows(engine.generate(prompt, spec, ids=[1]))
    assert len({tuple(r) for r in base + other_seed + other_id}) == 12


def test_greedy_gives_the_most_likely_tokens_of_transformers(engine: Engine) -> None:
    import torch

    model = make_model("moe", 11)
    engine.refit(model)
    (prompt,) = random_prompts(1, seed=6)
    (response,) = rows(engine.generate([prompt], SamplingSpec(0.0, 12, 1, seed=0)))
    with torch.no_grad():
        best = model(torch.tensor([prompt + response])).logits[0].argmax(-1)[len(prompt) - 1 : -1]
    assert response == best.tolist()


def test_truncated_is_true_exactly_where_no_end_token_was_sampled(engine: Engine) -> None:
    completions = engine.generate(random_prompts(16, seed=7), SamplingSpec(2.0, 200, 4, seed=0))
    ends = [r[-1] == EOS_ID for r in rows(completions)]
    assert any(ends)
    assert completions.truncated.tolist() == [not end for end in ends]
    assert all(EOS_ID not in r[:-1] for r in rows(completions))


def test_texts_are_the_sampled_tokens_decoded_without_the_special_ones_0_to_3(engine: Engine, moe_folder: Path) -> None:
    completions = engine.generate(random_prompts(16, seed=7), SamplingSpec(2.0, 200, 4, seed=0))
    tokenizer = AutoTokenizer.from_pretrained(moe_folder)
    assert completions.texts == [tokenizer.decode([t for t in r if t > 3]) for r in rows(completions)]
    assert len(set(completions.texts)) > 60


def test_a_prompt_of_250_tokens_gets_6_response_tokens_of_a_limit_of_256(engine: Engine) -> None:
    completions = engine.generate([[7] * 250], SamplingSpec(1.0, 32, 1, seed=0))
    assert completions.lengths.tolist() == [6]
    assert completions.truncated.tolist() == [True]


@pytest.mark.parametrize("length", [0, 256, 300])
def test_a_prompt_without_room_for_a_response_is_an_error_naming_the_limit_of_255(engine: Engine, length: int) -> None:
    with pytest.raises(UserError, match=f"prompt 1 has {length} tokens, expected 1 to 255"):
        engine.generate([[5], [5] * length], SamplingSpec(1.0, 4, 1, seed=0))


def test_no_prompts_give_no_completions(engine: Engine) -> None:
    completions = engine.generate([], SamplingSpec(1.0, 4, 2, seed=0))
    assert completions.lengths.shape == completions.truncated.shape == (0,)
    assert completions.token_ids.dtype == np.int32
    assert completions.logprobs.dtype == np.float32


def test_recipe_stop_token_ends_a_response_and_is_kept(new_engine: Callable[..., Engine]) -> None:
    engine = new_engine(stop_token_ids=list(range(100, 260)))
    for response in rows(engine.generate(random_prompts(4, seed=8), SamplingSpec(1.0, 64, 2, seed=0))):
        assert all(t < 100 or t >= 260 for t in response[:-1])
        assert response[-1] == EOS_ID or 100 <= response[-1] < 260 or len(response) == 64


def test_stop_string_ends_a_response_and_its_tokens_are_kept(new_engine: Callable[..., Engine]) -> None:
    plain, stopping = new_engine(), new_engine(stop_strings=["e"])
    prompts, spec = random_prompts(8, seed=9), SamplingSpec(1.0, 64, 4, seed=0)
    # Byte-level tokens in the order of the sorted alphabet; "e" is one of them.
    from tokenizers import pre_tokenizers

    letter = 4 + sorted(pre_tokenizers.ByteLevel.alphabet()).index("e")
    stopped = 0
    for full, cut in zip(rows(plain.generate(prompts, spec)), rows(stopping.generate(prompts, spec)), strict=True):
        expected = full[: full.index(letter) + 1] if letter in full else full
        assert cut == expected
        stopped += letter in full
    assert stopped > 0


def test_sample_seeds_of_4096_samples_differ_and_fit_in_63_bits() -> None:
    seeds = {sample_seed(s, p, j) for s in range(16) for p in range(16) for j in range(16)}
    assert len(seeds) == 4096
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_an_engine_that_failed_while_sampling_refuses_the_next_call(new_engine: Callable[..., Engine]) -> None:
    engine = new_engine()
    spec = SamplingSpec(3.0, 4, 1, seed=0)
    with pytest.raises(EngineUnusable, match=r"generation failed: .*temperature must be in \[0, 2\]"):
        engine.generate([[5]], spec)
    with pytest.raises(EngineUnusable, match="generation worker 0 is unusable: generation failed"):
        engine.generate([[5]], SamplingSpec(1.0, 4, 1, seed=0))


def test_a_worker_that_was_shut_down_can_be_shut_down_again(new_engine: Callable[..., Engine]) -> None:
    engine = new_engine()
    engine.process.call(engine.name, "shutdown")
    engine.process.call(engine.name, "shutdown")
