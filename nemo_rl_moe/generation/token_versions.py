"""Which version of the weights sampled which tokens of a response, for engines that do not say it themselves."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

Span = tuple[int, int]
"""Version of the weights, and the tokens that it sampled one after the other."""


class TokenVersions:
    """Notes how many tokens each running response has at every weight update."""

    def __init__(self) -> None:
        self._spans: dict[Hashable, list[Span]] = {}

    def begin(self, response: Hashable, version: int) -> None:
        """The response starts under a version."""
        self._spans[response] = [(version, 0)]

    def update(self, sampled: Mapping[Any, int], version: int) -> None:
        """From now on the version samples.

        Args:
            sampled: tokens of each running response so far, all by earlier versions; responses that were never begun
                do not matter.
        """
        for response, tokens in sampled.items():
            if (spans := self._spans.get(response)) is not None:
                spans[-1] = (spans[-1][0], tokens - sum(count for _, count in spans[:-1]))
                spans.append((version, 0))

    def end(self, response: Hashable, tokens: int) -> list[Span]:
        """Spans of a response that has ended with so many tokens, in order, none empty; it is forgotten.

        A search for stop strings may have cut off tokens that were counted at an update.
        """
        left, spans = tokens, []
        *earlier, (last, _) = self._spans.pop(response)
        for version, count in [*earlier, (last, tokens)]:
            own = min(count, left)
            left -= own
            if own:
                spans.append((version, own))
        return spans
