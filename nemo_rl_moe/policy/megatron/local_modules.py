"""The modules that take Transformer Engine's place in a model built from megatron-core's local layer spec."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence


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


class LocalAttention(torch.nn.Module):
    """Attention without Transformer Engine, through torch's fused kernel.

    Megatron's local attention stores the scores of all pairs of a row and knows nothing of packed sequences. Here a
    packed row costs the sum of the squares of its sequences' lengths, not the square of their sum.
    """

    def __init__(self, config: Any, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self._scale = softmax_scale
        self._grouped = config.num_query_groups != config.num_attention_heads

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Causal attention inside each sequence.

        Args:
            query: [S, B, heads, D], or [T, heads, D] with packed_seq_params of format thd; key and value likewise, with
                fewer heads where queries share them.
            attention_mask: bool [B, 1, S, S], True where a query must not see a key; None is causal.
            packed_seq_params: Megatron's boundaries of packed sequences; they must cover all T tokens. Its `families`,
                if any, are (tokens of a shared prompt, tokens of each response) one after the other, T tokens in all.

        Returns:
            [S, B, heads * D], or [T, heads * D].
        """
        if attention_bias is not None:
            raise NotImplementedError("attention bias")
        if packed_seq_params is None:
            rows = (x.transpose(0, 1) for x in (query, key, value))
            return self._attend(*rows, attention_mask).transpose(0, 1).flatten(2)
        if families := getattr(packed_seq_params, "families", ()):
            return self._attend_families(query, key, value, families)
        ends = packed_seq_params.cu_seqlens_q.tolist()
        lengths = (end - start for start, end in pairwise(ends))
        # Rows are packed longest first, so sequences of one length are neighbours and go through the kernel together.
        groups = [(length, len(list(group))) for length, group in groupby(lengths)]
        parts = zip(*(x.split([count * length for length, count in groups]) for x in (query, key, value)), strict=True)
        outputs = []
        for (length, count), part in zip(groups, parts, strict=True):
            rows = (x.view(count, length, *x.shape[1:]) for x in part)
            outputs.append(self._attend(*rows, None).reshape(count * length, -1))
        return torch.cat(outputs)

    def _attend_families(
        self, query: Tensor, key: Tensor, value: Tensor, families: Sequence[tuple[int, tuple[int, ...]]]
    ) -> Tensor:
        """[T, heads, D] of each in, [T, heads * D] out; a response sees its prompt and itself, a prompt only itself."""
        outputs = []
        sizes = [prompt + sum(responses) for prompt, responses in families]
        parts = zip(*(x.split(sizes) for x in (query, key, value)), strict=True)
        for (prompt, responses), part in zip(families, parts, strict=True):
            if prompt:
                outputs.append(self._attend(*(x[None, :prompt] for x in part), None)[0].flatten(1))
            heads = [x[:prompt] for x in part]
            tails = [x[prompt:].split(responses) for x in part]
            for start, end in _similar(responses):
                q, k, v = (pad_sequence(list(tail[start:end]), batch_first=True) for tail in tails)
                k, v = (
                    torch.cat((head[None].expand(end - start, -1, -1, -1), x), dim=1)
                    for head, x in zip(heads[1:], (k, v), strict=True)
                )
                # Pads are on the right of each response, where causality hides them from its tokens.
                hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(prompt + 1)
                attended = self._attend(q, k, v, hidden[None, None])
                outputs.extend(x[:n].flatten(1) for x, n in zip(attended, responses[start:end], strict=True))
        return torch.cat(outputs)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """[B, S, heads, D] of each in, the same out."""
        keep = None
        if mask is not None:
            keep = ~mask
            # A query that may see nothing would give NaN, which spreads to its whole row in backward.
            keep = keep | ~keep.any(-1, keepdim=True)
        out = scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (query, key, value)),
            attn_mask=keep,
            is_causal=keep is None,
            scale=self._scale,
            enable_gqa=self._grouped,
        )
        return out.transpose(1, 2)


def _similar(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Slices of lengths, longest first, whose shortest is at least half of the longest: padding stays below half."""
    start = 0
    for i, length in enumerate(lengths):
        if 2 * length < lengths[start]:
            yield start, i
            start = i
    yield start, len(lengths)
