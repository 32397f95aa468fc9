"""Problems -> token ids through the prompt file and the chat template."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_moe.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_text(path: str, key: str) -> str:
    """The text of a file that the recipe names under `key`."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{key}: cannot read {path!r} ({error})") from error


def read_prompt_template(path: str) -> str:
    """A prompt file, checked: one `{}` for the problem; literal braces are doubled, as in Python's format."""
    text = read_text(path, "data.default.prompt_file")
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]
    except ValueError as error:
        raise UserError(f"{path}: {error}; write a literal brace as {{{{ or }}}}") from error
    if fields != [""]:
        raise UserError(
            f"{path}: found the fields {['{' + name + '}' for name in fields]}, expected exactly one {{}} for the "
            "problem; write literal braces doubled, such as \\boxed{{}}"
        )
    return text


def render(
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[str],
    *,
    prompt_template: str | None,
    system_prompt: str | None,
    template_kwargs: dict[str, Any],
) -> list[list[int]]:
    """Token ids of each problem as a user's message, up to where the assistant's answer starts."""
    texts = []
    for problem in problems:
        messages = [{"role": "user", "content": prompt_template.format(problem) if prompt_template else problem}]
        if system_prompt is not None:
            messages.insert(0, {"role": "system", "content": system_prompt})
        try:
            text = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, **template_kwargs
            )
        except Exception as error:  # a template may raise whatever its author wrote
            raise UserError(f"the chat template failed: {error}") from error
        texts.append(text)
    if not texts:
        return []
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [one_bos(row, tokenizer.bos_token_id, _adds_bos(tokenizer)) for row in ids]


def one_bos(ids: list[int], bos_id: int | None, tokenizer_adds_bos: bool) -> list[int]:
    """The ids with exactly one begin token if the model expects one.

    A template that writes the token and a tokenizer that adds it give two, and a model scores everything after them
    differently; a template that leaves it out relies on the tokenizer.
    """
    if bos_id is None:
        return ids
    start = 0
    while start < len(ids) and ids[start] == bos_id:
        start += 1
    return [bos_id] * (1 if start or tokenizer_adds_bos else 0) + ids[start:]


def _adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    return tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
