"""One prompt as the loops see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt and what its verifier needs.

    Attributes:
        id: stable id of the row in its dataset (the row number), the same in every epoch and run.
        token_ids: the prompt through the chat template, with the generation prompt.
        text: the problem's text, for logs.
        env_name: key under `env` of the environment that scores the response.
        metadata: plain JSON-like data for the verifier, such as the answer.
    """

    id: int
    token_ids: list[int]
    text: str
    env_name: str
    metadata: dict[str, Any] = field(default_factory=dict)
