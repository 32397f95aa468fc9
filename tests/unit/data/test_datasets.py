"""Rows must reach the model exactly as meant, or be refused by file and line before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.data.chat import one_bos
from nemo_rl_moe.data.datasets import load_prompts
from nemo_rl_moe.errors import UserError
from tests.unit.data.conftest import CHAIN_SUM, make_recipe

REPOSITORY = Path(__file__).resolve().parents[3]


def jsonl(path: Path, *lines: str | dict[str, Any]) -> dict[str, Any]:
    """Writes the lines and returns the dataset section that reads them."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return {"dataset_name": "jsonl", "path": str(path)}


def chain_sum(**settings: Any) -> dict[str, Any]:
    return {"dataset_name": "reasoning_gym", "task": "chain_sum", "task_config": CHAIN_SUM, **settings}


def problem(number: int) -> dict[str, Any]:
    return {"problem": f"What is {number} + 1?", "answer": number + 1}


def test_a_reasoning_gym_row_becomes_the_chat_prompt_of_its_question(tokenizer: Any) -> None:
    prompts = load_prompts(make_recipe(chain_sum(size=3, seed=1)), "train", tokenizer)
    assert [p.id for p in prompts] == [0, 1, 2]
    assert prompts[0].text == "State the final answer to the following arithmetic problem: 4 - 1 ="
    assert tokenizer.decode(prompts[0].token_ids) == (
        "<|im_start|>user\nState the final answer to the following arithmetic problem: 4 - 1 =<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert len(prompts[0].token_ids) == 24
    assert prompts[0].env_name == "math"
    assert prompts[0].metadata["answer"] == "3"
    assert prompts[0].metadata["task"] == "chain_sum"
    assert prompts[0].metadata["entry"]["question"] == prompts[0].text


def test_reasoning_gym_makes_500_rows_when_size_is_null_and_the_same_ones_each_time(tokenizer: Any) -> None:
    recipe = make_recipe(chain_sum(seed=5))
    first, second = (load_prompts(recipe, "train", tokenizer) for _ in range(2))
    assert len(first) == 500
    assert first == second


def test_validation_is_empty_when_the_recipe_has_none(tokenizer: Any) -> None:
    assert load_prompts(make_recipe(chain_sum(size=3)), "validation", tokenizer) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": None}, r"data.train.task: not set"),
        (
            {"task": "chain_sums"},
            r"data.train.task: reasoning-gym has no task 'chain_sums'; did you mean 'chain_sum'\?",
        ),
        ({"task_config": {"min_term": 2}}, r"data.train.task_config: chain_sum refuses .*min_term"),
        ({"task_config": {"min_terms": 5, "max_terms": 2}}, r"task_config: chain_sum refuses .*max_terms must be"),
        ({"task_config": {"seed": 3}}, r"data.train.task_config: \['seed'\] belong one level up, at data.train.seed"),
    ],
)
def test_a_wrong_task_is_named_by_its_dotted_path(tokenizer: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_prompts(make_recipe(chain_sum(**settings)), "train", tokenizer)


def test_validation_rows_that_training_has_too_are_refused_with_a_seed_that_works(tokenizer: Any) -> None:
    train = chain_sum(size=100, seed=0)
    with pytest.raises(UserError, match=r"data.validation.seed: 99 gives rows that data.train .* take 100 or more"):
        load_prompts(make_recipe(train, validation=chain_sum(size=10, seed=99)), "validation", tokenizer)
    assert len(load_prompts(make_recipe(train, validation=chain_sum(size=10, seed=100)), "validation", tokenizer)) == 10


def test_a_jsonl_row_keeps_its_other_keys_for_the_verifier(tokenizer: Any, tmp_path: Path) -> None:
    rows = jsonl(tmp_path / "rows.jsonl", {"question": "1 + 1?", "result": 2, "level": "easy"}, "", problem(3))
    rows |= {"problem_key": "question", "answer_key": "result", "size": 1}
    [prompt] = load_prompts(make_recipe(rows, prompts_per_step=1), "train", tokenizer)
    assert prompt.text == "1 + 1?"
    assert prompt.metadata == {"answer": "2", "result": 2, "level": "easy"}


def test_line_separators_inside_a_string_and_a_byte_order_mark_do_not_break_lines(
    tokenizer: Any, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes('\ufeff{"problem": "a\u2028b", "answer": "1"}\r\n{"problem": "c", "answer": "2"}'.encode())
    prompts = load_prompts(make_recipe({"dataset_name": "jsonl", "path": str(path)}), "train", tokenizer)
    assert [p.text for p in prompts] == ["a\u2028b", "c"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"problem": "1 + 1?", "answer": ', r"rows.jsonl:3: broken JSON at column \d+"),
        ('{"problem": "1 + 1?"}', r"rows.jsonl:3: no key 'answer'; the row has \['problem'\]"),
        ('{"problme": "?", "answer": "2"}', r"rows.jsonl:3: no key 'problem'.*; did you mean 'problme'\?"),
        ('{"problem": 5, "answer": "2"}', r"rows.jsonl:3: 'problem' is 5, expected a text that is not empty"),
        ('{"problem": " ", "answer": "2"}', r"rows.jsonl:3: 'problem' is ' ', expected"),
        ('{"problem": "?", "answer": null}', r"rows.jsonl:3: 'answer' is None, expected a number or a text"),
        ('{"problem": "?", "answer": true}', r"rows.jsonl:3: 'answer' is True, expected"),
        ('{"problem": "?", "answer": ["2"]}', r"rows.jsonl:3: 'answer' is \['2'\], expected"),
        ('["?", "2"]', r"rows.jsonl:3: found a list, expected an object"),
    ],
)
def test_a_bad_jsonl_row_is_named_by_file_and_line_3(tokenizer: Any, tmp_path: Path, line: str, message: str) -> None:
    rows = jsonl(tmp_path / "rows.jsonl", problem(1), "", line)
    with pytest.raises(UserError, match=message):
        load_prompts(make_recipe(rows), "train", tokenizer)


def test_bytes_that_are_not_utf_8_are_named_by_file_and_line(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"problem": "a", "answer": "1"}\n{"problem": "\xff", "answer": "1"}\n')
    with pytest.raises(UserError, match=r"rows.jsonl:2: not UTF-8"):
        load_prompts(make_recipe({"dataset_name": "jsonl", "path": str(path)}), "train", tokenizer)


def test_an_empty_file_a_missing_file_and_no_path_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"empty.jsonl: holds no rows"):
        load_prompts(make_recipe(jsonl(tmp_path / "empty.jsonl", "", "")), "train", tokenizer)
    with pytest.raises(UserError, match=r"data.train.path: there is no file 'absent.jsonl'"):
        load_prompts(make_recipe({"dataset_name": "jsonl", "path": "absent.jsonl"}), "train", tokenizer)
    with pytest.raises(UserError, match=r"data.train.path: not set"):
        load_prompts(make_recipe({"dataset_name": "jsonl"}), "train", tokenizer)


def test_three_rows_do_not_fill_a_step_of_four_prompts(tokenizer: Any, tmp_path: Path) -> None:
    rows = jsonl(tmp_path / "rows.jsonl", *map(problem, range(3)))
    with pytest.raises(UserError, match=r"data.train: 3 rows, but grpo.num_prompts_per_step is 4"):
        load_prompts(make_recipe(rows, prompts_per_step=4), "train", tokenizer)
    assert len(load_prompts(make_recipe(rows, prompts_per_step=3), "train", tokenizer)) == 3


def test_a_prompt_longer_than_the_limit_is_named_with_its_length(tokenizer: Any, tmp_path: Path) -> None:
    rows = jsonl(tmp_path / "rows.jsonl", problem(1), {"problem": "1" * 40, "answer": "1"}, problem(2))
    # 40 digits and the 8 tokens of the chat template around them.
    assert max(len(p.token_ids) for p in load_prompts(make_recipe(rows), "train", tokenizer)) == 48
    with pytest.raises(
        UserError, match=r"rows.jsonl:2: the prompt has 48 tokens, data.max_input_seq_length is 47 \(1 of"
    ):
        load_prompts(make_recipe(rows, max_input_seq_length=47), "train", tokenizer)


def test_the_prompt_file_and_the_system_prompt_reach_the_model(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Answer in \\boxed{{}}.\n{}")
    (tmp_path / "system.txt").write_text("Be brief.")
    defaults = {"prompt_file": str(tmp_path / "prompt.txt"), "system_prompt_file": str(tmp_path / "system.txt")}
    rows = jsonl(tmp_path / "rows.jsonl", {"problem": "{1} + {2}?", "answer": 3})
    [prompt] = load_prompts(make_recipe(rows, prompts_per_step=1, default=defaults), "train", tokenizer)
    assert tokenizer.decode(prompt.token_ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nAnswer in \\boxed{}.\n{1} + {2}?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert prompt.text == "{1} + {2}?"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no place", r"found the fields \[\], expected exactly one \{\}"),
        ("{} and {}", r"found the fields \['\{\}', '\{\}'\], expected exactly one"),
        ("\\boxed{answer} {}", r"found the fields \['\{answer\}', '\{\}'\].*doubled"),
        ("{} }", r"write a literal brace as"),
    ],
)
def test_a_prompt_file_without_exactly_one_place_for_the_problem_is_refused(
    tokenizer: Any, tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "prompt.txt").write_text(text)
    recipe = make_recipe(chain_sum(size=3), default={"prompt_file": str(tmp_path / "prompt.txt")})
    with pytest.raises(UserError, match=message):
        load_prompts(recipe, "train", tokenizer)


def test_template_variables_of_the_recipe_reach_the_chat_template(tokenizer_dir: Path) -> None:
    from nemo_rl_moe.data.tokenizer import load_tokenizer

    settings = {
        "name": str(tokenizer_dir),
        "chat_template": "{{ messages[0]['content'] }}{% if think %} think{% endif %}",
        "chat_template_kwargs": {"think": True},
    }
    recipe = make_recipe(chain_sum(size=2), policy={"tokenizer": settings})
    tokenizer = load_tokenizer(recipe.policy)
    assert tokenizer.decode(load_prompts(recipe, "train", tokenizer)[0].token_ids).endswith("= think")


def test_a_chat_template_that_raises_is_the_users_error_with_its_own_words(tokenizer_dir: Path) -> None:
    from nemo_rl_moe.data.tokenizer import load_tokenizer

    settings = {"name": str(tokenizer_dir), "chat_template": "{{ raise_exception('no system role') }}"}
    recipe = make_recipe(chain_sum(size=2), policy={"tokenizer": settings})
    with pytest.raises(UserError, match="the chat template failed: no system role"):
        load_prompts(recipe, "train", load_tokenizer(recipe.policy))


def test_the_environment_comes_from_the_dataset_then_the_defaults_then_the_only_one_there_is(tokenizer: Any) -> None:
    env = {"a": {"verifier": "math_verify"}, "b": {"verifier": "reasoning_gym"}}

    def name(settings: dict[str, Any], default: dict[str, Any], envs: dict[str, Any] = env) -> str:
        recipe = make_recipe(chain_sum(size=2, **settings), env=envs, default=default)
        return load_prompts(recipe, "train", tokenizer)[0].env_name

    assert name({"env_name": "a"}, {"env_name": "b"}) == "a"
    assert name({}, {"env_name": "b"}) == "b"
    assert name({}, {}, {"b": env["b"]}) == "b"
    with pytest.raises(UserError, match=r"data.train.env_name: not set; expected one of \['a', 'b'\]"):
        name({}, {})
    with pytest.raises(UserError, match=r"data.train.env_name: 'c' is not defined under env"):
        name({"env_name": "c"}, {})


@pytest.mark.parametrize(
    ("ids", "bos_id", "adds", "expected"),
    [
        ([5, 6], None, False, [5, 6]),
        ([5, 6], 1, False, [5, 6]),
        ([5, 6], 1, True, [1, 5, 6]),
        ([1, 5, 6], 1, True, [1, 5, 6]),
        ([1, 5, 6], 1, False, [1, 5, 6]),
        ([1, 1, 5, 1], 1, True, [1, 5, 1]),
    ],
)
def test_a_prompt_starts_with_exactly_one_begin_token_where_the_model_has_one(
    ids: list[int], bos_id: int | None, adds: bool, expected: list[int]
) -> None:
    assert one_bos(ids, bos_id, adds) == expected


@pytest.mark.parametrize("template_writes_bos", [True, False])
def test_a_tokenizer_that_adds_its_own_begin_token_gives_one_whether_or_not_the_template_writes_it(
    tmp_path: Path, template_writes_bos: bool
) -> None:
    from tokenizers.processors import TemplateProcessing

    from nemo_rl_moe.data.tokenizer import load_tokenizer
    from tools.make_tiny_moe import Settings, make_tokenizer

    made = make_tokenizer(Settings())
    made.bos_token = "<|im_start|>"
    made._tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 2)])
    made.save_pretrained(tmp_path)
    template = "{{ bos_token }}" if template_writes_bos else ""
    settings = {"name": str(tmp_path), "chat_template": template + "{{ messages[0]['content'] }}"}
    recipe = make_recipe(chain_sum(size=2), policy={"tokenizer": settings})
    tokenizer = load_tokenizer(recipe.policy)
    assert tokenizer("a")["input_ids"][0] == 2
    ids = load_prompts(recipe, "train", tokenizer)[0].token_ids
    assert ids[0] == 2
    assert ids.count(2) == 1


def test_the_shipped_jsonl_has_64_distinct_problems_that_load(tokenizer: Any) -> None:
    rows = {"dataset_name": "jsonl", "path": str(REPOSITORY / "examples/data/arithmetic.jsonl")}
    prompts = load_prompts(make_recipe(rows), "train", tokenizer)
    assert len({p.text for p in prompts}) == 64
