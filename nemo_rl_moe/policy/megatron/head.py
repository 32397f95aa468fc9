"""The output layer on the wanted rows only.

Prompt tokens have no place in the loss, yet a GPTModel computes logits for every slot. With a large vocabulary that is
most of a small model's work and memory, so the rows are picked before the output layer instead of after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class HeadRows:
    """Picks rows of the hidden states in front of the output layer of the model's last chunk.

    Args:
        model: the chunks of this rank, wrapped or not.

    Attributes:
        active: False where rows cannot be picked: not the last pipeline stage, or a sequence-parallel output layer,
            which gathers its input itself.
    """

    def __init__(self, model: Sequence[Any]) -> None:
        chunk = model[-1]
        while hasattr(chunk, "module"):
            chunk = chunk.module
        self.active = bool(chunk.post_process) and not chunk.config.sequence_parallel
        self._sources: Tensor | None = None
        if self.active:
            chunk.output_layer.register_forward_pre_hook(self._pick)

    def pick(self, sources: Tensor) -> Tensor | None:
        """The next forward pass gives logits [1, n, V / tp] of these rows, if `active`.

        Args:
            sources: int64 [n], slots b * S + s.

        Returns:
            Where the wanted rows are in the logits: None when the logits are these rows, else `sources`.
        """
        self._sources = sources if self.active else None
        return None if self.active else sources

    def _pick(self, _: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._sources is None:
            return None
        hidden, *rest = args
        # [S, B, H] in Megatron; transposed, row b * S + s is slot (b, s).
        rows = hidden.transpose(0, 1).flatten(0, 1)[self._sources]
        return (rows[:, None], *rest)
