"""Weights of one version, which any receiver may take at any time until there are newer ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from nemo_rl_moe.refit.layout import WeightLayout


class WeightOffer(Protocol):
    """What the generator asks of whoever has the weights.

    A receiver that is started anew takes them later than the others, so an offer stands until the next one.
    """

    @property
    def version(self) -> int:
        """Of the weights."""

    def served_to(self, rank: int) -> contextlib.AbstractContextManager[dict[str, Any]]:
        """While it is entered, the generation rank gets the weights by an update with these values: what vLLM's
        weight-transfer engine takes as `update_info`, in plain data.
        """


@dataclass(frozen=True)
class SharedMemoryOffer:
    """Weights in a buffer that all receivers map.

    Attributes:
        path: file of the buffer.
        layout: of the buffer.
        digest: `weight_digest` of the buffer.
        version: of the weights.
    """

    path: str
    layout: WeightLayout
    digest: dict[str, str]
    version: int

    @contextlib.contextmanager
    def served_to(self, rank: int) -> Iterator[dict[str, Any]]:
        """Nothing to do: it lies there."""
        yield {"layout": self.layout.to_plain(), "digest": self.digest, "path": self.path}
