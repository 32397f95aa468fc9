"""Datasets -> prompts. Two kinds: tasks of the reasoning-gym library, and JSONL files of problem and answer rows."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nemo_rl_moe.data import chat
from nemo_rl_moe.data.prompt import Prompt
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.schema import DatasetConfig, Recipe
from nemo_rl_moe.recipe.scoring import environment_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REASONING_GYM_ROWS = 500


@dataclass(frozen=True)
class Row:
    """One row before tokenization; `where` names it in errors."""

    problem: str
    metadata: dict[str, Any]
    where: str


def load_prompts(
    recipe: Recipe, split: Literal["train", "validation"], tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    """The tokenized prompts of `data.train` or `data.validation` (none when that is null), in the dataset's order.

    Raises:
        UserError: the rows cannot be read, a prompt is longer than data.max_input_seq_length, the environment is
            not defined, or the training rows do not fill one step.
    """
    data = recipe.data
    dataset = data.train if split == "train" else data.validation
    if dataset is None:
        return []
    key = f"data.{split}"
    env_name = environment_name(recipe, dataset)
    if env_name is None or env_name not in recipe.env:
        # A recipe that was loaded with its rules never gets here.
        found = "not set" if env_name is None else f"{env_name!r} is not defined under env"
        raise UserError(f"{key}.env_name: {found}; expected one of {sorted(recipe.env)}")
    rows = read_rows(dataset, key)
    if split == "train" and len(rows) < recipe.grpo.num_prompts_per_step:
        raise UserError(
            f"{key}: {len(rows)} rows, but grpo.num_prompts_per_step is {recipe.grpo.num_prompts_per_step}; "
            "take more rows or fewer prompts"
        )
    if split == "validation":
        _refuse_shared_rows(data.train, dataset)
    ids = chat.render(
        tokenizer,
        [row.problem for row in rows],
        prompt_template=chat.read_prompt_template(data.default.prompt_file) if data.default.prompt_file else None,
        system_prompt=(
            chat.read_text(data.default.system_prompt_file, "data.default.system_prompt_file")
            if data.default.system_prompt_file
            else None
        ),
        template_kwargs=recipe.policy.tokenizer.chat_template_kwargs,
    )
    _check_lengths(rows, ids, data.max_input_seq_length)
    return [
        Prompt(index, tokens, row.problem, env_name, row.metadata)
        for index, (row, tokens) in enumerate(zip(rows, ids, strict=True))
    ]


def read_rows(dataset: DatasetConfig, key: str) -> list[Row]:
    """The rows of a dataset; `key` is its dotted path in the recipe, for errors."""
    if dataset.dataset_name == "reasoning_gym":
        return _reasoning_gym_rows(dataset, key)
    return _jsonl_rows(dataset, key)


def _reasoning_gym_rows(dataset: DatasetConfig, key: str) -> list[Row]:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    task = dataset.task
    if task is None:
        raise UserError(f"{key}.task: not set; expected the name of a reasoning-gym task, such as chain_sum")
    if task not in DATASETS:
        raise UserError(f"{key}.task: reasoning-gym has no task {task!r}{_near(task, sorted(DATASETS))}")
    taken = {"seed", "size"} & set(dataset.task_config)
    if taken:
        raise UserError(f"{key}.task_config: {sorted(taken)} belong one level up, at {key}.seed and {key}.size")
    size = dataset.size or _REASONING_GYM_ROWS
    try:
        rows = reasoning_gym.create_dataset(task, seed=dataset.seed, size=size, **dataset.task_config)
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(f"{key}.task_config: {task} refuses {dataset.task_config}: {error}") from error
    # The verifier process rebuilds the task from its name and settings: the object itself may not be picklable.
    return [
        Row(
            entry["question"],
            {"task": task, "task_config": dataset.task_config, "answer": entry["answer"], "entry": entry},
            f"{key} (reasoning_gym {task}) row {index}",
        )
        for index, entry in enumerate(rows[i] for i in range(size))
    ]


def _refuse_shared_rows(train: DatasetConfig, validation: DatasetConfig) -> None:
    """reasoning-gym draws row i from seed + i, so seeds closer than the size give the same rows, shifted."""
    if {train.dataset_name, validation.dataset_name} != {"reasoning_gym"}:
        return
    if (train.task, train.task_config) != (validation.task, validation.task_config):
        return
    train_end = train.seed + (train.size or _REASONING_GYM_ROWS)
    validation_end = validation.seed + (validation.size or _REASONING_GYM_ROWS)
    if train.seed < validation_end and validation.seed < train_end:
        raise UserError(
            f"data.validation.seed: {validation.seed} gives rows that data.train (seed {train.seed}) has too, because "
            f"row i is drawn from seed + i; take {train_end} or more"
        )


def _jsonl_rows(dataset: DatasetConfig, key: str) -> list[Row]:
    if dataset.path is None:
        raise UserError(f"{key}.path: not set; expected a JSONL file")
    path = Path(dataset.path)
    if not path.is_file():
        raise UserError(f"{key}.path: there is no file {dataset.path!r}")
    rows = []
    # Bytes, split on newlines only: str.splitlines would also split at separators that JSON allows inside strings.
    for number, line in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        rows.append(_jsonl_row(line, f"{dataset.path}:{number}", dataset))
        if len(rows) == dataset.size:
            break
    if not rows:
        raise UserError(f"{dataset.path}: holds no rows")
    return rows


def _jsonl_row(line: bytes, where: str, dataset: DatasetConfig) -> Row:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 ({error})") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: broken JSON at column {error.colno}: {error.msg}") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: found a {type(row).__name__}, expected an object with {dataset.problem_key!r}")
    for name in (dataset.problem_key, dataset.answer_key):
        if name not in row:
            raise UserError(f"{where}: no key {name!r}; the row has {sorted(row)}{_near(name, sorted(row))}")
    problem, answer = row[dataset.problem_key], row[dataset.answer_key]
    if not isinstance(problem, str) or not problem.strip():
        raise UserError(f"{where}: {dataset.problem_key!r} is {problem!r}, expected a text that is not empty")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
        raise UserError(f"{where}: {dataset.answer_key!r} is {answer!r}, expected a number or a text that is not empty")
    rest = {name: value for name, value in row.items() if name != dataset.problem_key}
    return Row(problem, rest | {"answer": str(answer)}, where)


def _check_lengths(rows: Sequence[Row], ids: Sequence[Sequence[int]], limit: int) -> None:
    long = [(len(tokens), row.where) for row, tokens in zip(rows, ids, strict=True) if len(tokens) > limit]
    if long:
        length, where = long[0]
        raise UserError(
            f"{where}: the prompt has {length} tokens, data.max_input_seq_length is {limit} "
            f"({len(long)} of {len(rows)} rows are too long, the longest has {max(long)[0]})"
        )


def _near(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
