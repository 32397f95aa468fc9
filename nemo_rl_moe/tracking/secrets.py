"""Keeps secrets out of everything that a run writes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

REDACTED = "<redacted>"

_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?(_|$)", re.IGNORECASE)
_USER_IN_URL = re.compile(r"(\w+://)[^/\s:@]+:[^/\s@]+@")
# Maps of a recipe or plan whose keys are the user's own. Elsewhere keys are the schema's (`answer_key`), never secret.
_FREE_MAPS = ("env_vars", "vllm_kwargs", "environment")
# Shorter values ("1", "true") are too common in ordinary text to be replaced wherever they occur.
_SHORTEST = 6


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a secret (`HF_TOKEN`, `WANDB_API_KEY`; not `TOKENIZERS_PARALLELISM`)."""
    return _SECRET_NAME.search(name) is not None


class Redactor:
    """Removes secrets from texts and from recipe data.

    Args:
        environ: environment of the process; values of secret names are removed wherever they occur.
        recipe: the resolved recipe, whose worker environments may hold further ones.
    """

    def __init__(self, environ: Mapping[str, str], recipe: Mapping[str, Any]) -> None:
        named = [value for name, value in environ.items() if is_secret_name(name)]
        found = {value for value in [*named, *_secrets(recipe, free=False)] if len(value) >= _SHORTEST}
        # Longest first: a secret that contains another must not leave its rest behind.
        self._values = sorted(found, key=len, reverse=True)

    def text(self, text: str) -> str:
        """The text without secret values and without `user:password@` in addresses."""
        for value in self._values:
            text = text.replace(value, REDACTED)
        return _USER_IN_URL.sub(rf"\1{REDACTED}@", text)

    def argument(self, argument: str) -> str:
        """A command-line argument; overrides of a free map lose the values of secret names."""
        key, equals, _ = argument.partition("=")
        parts = key.split(".")
        free = [i for i, part in enumerate(parts) if part in _FREE_MAPS]
        if equals and free and (free[0] == len(parts) - 1 or is_secret_name(parts[-1])):
            return f"{key}={REDACTED}"
        return self.text(argument)

    def tree(self, value: Any, *, free: bool = False) -> Any:
        """Maps, lists and scalars with secrets replaced; the input is not changed."""
        if isinstance(value, Mapping):
            return {
                key: REDACTED
                if free and isinstance(item, str) and is_secret_name(str(key))
                else self.tree(item, free=free or key in _FREE_MAPS)
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.tree(item, free=free) for item in value]
        return self.text(value) if isinstance(value, str) else value


def _secrets(value: Any, *, free: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if free and isinstance(item, str) and is_secret_name(str(key)):
                yield item
            yield from _secrets(item, free=free or key in _FREE_MAPS)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _secrets(item, free=free)
