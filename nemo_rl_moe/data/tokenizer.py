"""The tokenizer of a run, checked for what the loops need."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.schema import PolicyConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(policy: PolicyConfig) -> PreTrainedTokenizerBase:
    """Loads the tokenizer named by the recipe; no code of its folder runs unless `trust_remote_code` is set.

    Raises:
        UserError: there is no such tokenizer, or it lacks a chat template, an end token or a padding token.
    """
    tokenizer, (key, name) = open_tokenizer(policy), _name(policy)
    if not tokenizer.chat_template:
        raise UserError(f"{key}: {name!r} has no chat template; set policy.tokenizer.chat_template")
    if tokenizer.eos_token_id is None:
        raise UserError(f"{key}: {name!r} has no end token (eos_token), so a response could never end by itself")
    if tokenizer.pad_token_id is None:
        raise UserError(
            f"{key}: {name!r} has no padding token; set policy.tokenizer.pad_token to one of its tokens, "
            f"such as {tokenizer.eos_token!r} (padding is told by lengths, never by the id)"
        )
    return tokenizer


def open_tokenizer(policy: PolicyConfig) -> PreTrainedTokenizerBase:
    """The same tokenizer, unchecked: for a worker, whose driver has checked it.

    Raises:
        UserError: there is no such tokenizer, or not the padding token that the recipe names.
    """
    from transformers import AutoTokenizer

    key, name = _name(policy)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=policy.trust_remote_code)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and more for one and the same cause
        raise UserError(_load_message(key, name, error)) from error
    if policy.tokenizer.chat_template is not None:
        tokenizer.chat_template = policy.tokenizer.chat_template
    if policy.tokenizer.pad_token is not None:
        _set_pad_token(tokenizer, policy.tokenizer.pad_token)
    return tokenizer


def _name(policy: PolicyConfig) -> tuple[str, str]:
    """The key that names the tokenizer, and its value."""
    own = policy.tokenizer.name
    return ("policy.tokenizer.name", own) if own else ("policy.model_name", policy.model_name)


def _set_pad_token(tokenizer: PreTrainedTokenizerBase, token: str) -> None:
    # Setting an unknown token would grow the vocabulary past the model's embedding.
    if token not in tokenizer.get_vocab():
        raise UserError(f"policy.tokenizer.pad_token: {token!r} is not in the tokenizer's vocabulary")
    tokenizer.pad_token = token


def _load_message(key: str, name: str, error: Exception) -> str:
    cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if "custom code" in cause:
        return f"{key}: {name!r} brings code of its own; set policy.trust_remote_code to true to let it run"
    if Path(name).is_dir():
        return f"{key}: the folder {name!r} holds no tokenizer that transformers can load ({cause})"
    return (
        f"{key}: {name!r} is neither a folder here nor a model that the Hugging Face hub gave us ({cause}); "
        "`make model` makes the tiny models of the examples"
    )
