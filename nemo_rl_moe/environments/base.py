"""What the loops ask of environments, and what an environment asks of a verifier."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nemo_rl_moe.errors import RunFailed


class Verifier(Protocol):
    """A function that scores one response. It runs in a process of its own that may be killed at any time."""

    def __call__(self, response: str, metadata: dict[str, Any]) -> float:
        """The reward, a finite number, of the decoded response.

        `metadata` is the prompt's (see the dataset), with `problem` added: the problem's text.
        """


class VerifierError(RunFailed):
    """A verifier failed on a sample and the environment says `on_error: fail`."""


@dataclass(frozen=True)
class ScoreRequest:
    """One response to score.

    Attributes:
        env_name: key under `env` of the environment.
        prompt_id: row of the dataset, for messages.
        problem: the problem's text.
        response: the decoded response, without special tokens.
        metadata: what the verifier needs, such as the answer.
    """

    env_name: str
    prompt_id: int
    problem: str
    response: str
    metadata: dict[str, Any]


@dataclass
class ScoreResult:
    """The scores of N requests, in their order.

    Attributes:
        rewards: float32 [N]; 0 where the verifier failed.
        errors: samples whose verifier raised or whose process died.
        timeouts: samples whose process was killed at the time limit.
        messages: what went wrong, one line each, the first few only.
    """

    rewards: NDArray[np.float32]
    errors: int = 0
    timeouts: int = 0
    messages: list[str] = field(default_factory=list)
