"""Risk: a command line that sets nothing, or something else."""

from __future__ import annotations

import pytest

from nemo_rl_moe.recipe.load import load_recipe
from tests.unit.recipes.writing import TINY, problems_of


def value(*overrides: str):
    return load_recipe(TINY, overrides, check=False).recipe


def only(*overrides: str) -> str:
    problems = problems_of(TINY, *overrides)
    assert len(problems) == 1
    return str(problems[0])


def test_plain_override_sets_a_key_of_the_recipe_and_one_of_the_schema_only():
    assert value("grpo.max_num_steps=7").grpo.max_num_steps == 7
    assert value("grpo.seed=7").grpo.seed == 7


def test_values_keep_their_types():
    recipe = value(
        "policy.megatron_cfg.optimizer.lr=1e-6", "data.shuffle=false", "policy.generation.stop_strings=[a,'b c']"
    )
    assert recipe.policy.megatron_cfg.optimizer.lr == 1e-6
    assert recipe.data.shuffle is False
    assert recipe.policy.generation.stop_strings == ["a", "b c"]


def test_null_and_a_map_override():
    recipe = value("data.validation=null", "grpo.reward_shaping={enabled: true, overlong_buffer_length: 8}")
    assert recipe.data.validation is None
    assert recipe.grpo.reward_shaping.overlong_buffer_length == 8


def test_overriding_the_source_moves_what_is_interpolated_from_it():
    assert value("grpo.num_prompts_per_step=5").policy.train_global_batch_size == 5 * 8


def test_later_override_wins():
    assert value("grpo.seed=1", "grpo.seed=2").grpo.seed == 2


def test_plus_adds_to_an_open_map_and_a_plain_override_does_not():
    assert value("+policy.generation.vllm_kwargs.max_num_seqs=8").policy.generation.vllm_kwargs == {"max_num_seqs": 8}
    assert only("policy.generation.vllm_kwargs.max_num_seqs=8") == (
        "command line 'policy.generation.vllm_kwargs.max_num_seqs=8': policy.generation.vllm_kwargs.max_num_seqs: "
        "no such key in the recipe; +policy.generation.vllm_kwargs.max_num_seqs=... adds it"
    )


def test_plus_on_a_key_that_is_there_is_refused_and_double_plus_sets_it():
    assert "exists already with the value 16 (" in only("+grpo.num_prompts_per_step=4")
    assert value("++grpo.num_prompts_per_step=4").grpo.num_prompts_per_step == 4
    assert value("++env.other.verifier=math_verify").env["other"].verifier == "math_verify"


def test_tilde_deletes_so_that_the_default_counts():
    assert value("~grpo.max_num_steps").grpo.max_num_steps == 1_000_000
    assert "nothing to delete" in only("~grpo.seed")
    assert "deletes 5, but the value is 16 (" in only("~grpo.num_prompts_per_step=5")


def test_misspelled_key_has_its_near_match():
    assert only("grpo.num_prompt_per_step=8") == (
        "command line 'grpo.num_prompt_per_step=8': grpo.num_prompt_per_step: unknown key; "
        "did you mean grpo.num_prompts_per_step?"
    )
    assert "policy.megatron: unknown key; did you mean policy.megatron_cfg?" in only("policy.megatron.optimizer.lr=1")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("grpo.seed", "expected key=value, +key=value, ++key=value or ~key"),
        ("grpo.seed=1,2", "a sweep, but a run takes one value"),
        ("grpo.seed=range(1,3)", "a sweep"),
        ("grpo@x=1", "expected a dotted key"),
        ("data.train[0]=1", "expected key=value"),
        ("grpo.seed.deeper=1", "grpo.seed.deeper: unknown key"),
    ],
)
def test_override_that_means_nothing_is_refused(text, part):
    assert part in only(text)


def test_two_wrong_overrides_are_both_reported():
    assert len(problems_of(TINY, "grpo.sed=1", "polcy.precision=x")) == 2


def test_type_error_of_an_override_names_the_command_line():
    assert only("grpo.seed=-1") == "command line 'grpo.seed=-1': grpo.seed: found -1, expected at least 0"


def test_interpolation_in_an_override_is_resolved():
    assert value("grpo.val_batch_size=${grpo.num_prompts_per_step}").grpo.val_batch_size == 16
