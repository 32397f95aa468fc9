"""The modules that take Transformer Engine's place in a model built from megatron-core's local layer spec."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm that may run under sequence parallelism.

    Megatron's own wrapper refuses sequence parallelism, yet its MoE layers demand it under tensor parallelism. All
    that is needed is the mark on the weight: Megatron then adds up its gradient over the tensor-parallel ranks, each
    of which has seen other tokens.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class PositionedRotaryEmbedding(RotaryEmbedding):
    """Rotary angles of given positions, where Megatron's own takes the index in the row as the position.

    RoPE depends on differences of positions only, so a constant offset in each packed sequence would be harmless in
    exact arithmetic; in float32 the angle of position p has an error of about p / 2^24, which shows beyond a few
    thousand tokens. With true positions a packed sequence gives what it gives alone, and a packed row may be longer
    than the longest sequence that the model takes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._position_ids: Tensor | None = None

    def attach(self, model: torch.nn.Module) -> None:
        """Takes the positions from the `position_ids` that the model is called with, from now on."""
        model.register_forward_pre_hook(self._remember, with_kwargs=True)

    def _remember(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._position_ids = kwargs["position_ids"] if "position_ids" in kwargs else args[1]

    def forward(self, max_seq_len: int, *_: Any, **__: Any) -> Tensor:  # type: ignore[override]
        """float32 [S, B, 1, D] angles (S, 1, 1, D when the model was given no positions)."""
        if self._position_ids is None:
            return self.get_emb(max_seq_len)
        angles = self._position_ids.t().to(torch.float32)[..., None] * self.inv_freq
        return torch.cat((angles, angles), dim=-1)[:, :, None]
