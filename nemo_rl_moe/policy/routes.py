"""Experts that a pass of the trainer recorded: each rank's layers and tokens, put together on the driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nemo_rl_moe.batch import IntArray


@dataclass(frozen=True)
class RecordedRoutes:
    """What one rank recorded.

    Attributes:
        layers: its decoder layers that have experts, by index in the whole model.
        num_layers: decoder layers of the whole model.
        experts: int8 or int16 [T, len(layers), K], of the tokens of its shard.
    """

    layers: tuple[int, ...]
    num_layers: int
    experts: NDArray[np.signedinteger]


def join_routes(num_tokens: int, parts: Sequence[tuple[IntArray, RecordedRoutes]]) -> NDArray[np.signedinteger]:
    """All ranks' routes as one array.

    Args:
        num_tokens: tokens of the whole batch.
        parts: of each rank the positions in the batch of its shard's tokens, and what it recorded.

    Returns:
        [num_tokens, L, K], -1 in layers without experts.
    """
    _, first = parts[0]
    shape = (num_tokens, first.num_layers, first.experts.shape[-1])
    out = np.full(shape, -1, dtype=first.experts.dtype)
    for index, routes in parts:
        out[index[:, None], np.array(routes.layers)] = routes.experts
    return out
