"""Log-probabilities of given tokens from logits whose vocabulary is split over tensor-parallel ranks.

log p(v) = x_v - log sum_u exp(x_u) with x = logits / temperature, in float32 whatever the logits' format. Each rank
reduces its own part of the vocabulary first; two small all-reduces join the parts. The softmax is never stored:
backward makes it anew from the logits, a few rows at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Rows are worked on in pieces of about this many float32 values: a float32 copy of all bfloat16 logits would not fit.
_CHUNK_ELEMENTS = 1 << 24


def token_logprobs(
    logits: Tensor,
    sources: Tensor | None,
    targets: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of `targets[i]` under row `sources[i]` of the logits.

    Args:
        logits: [..., V / tp], this rank's part of the (padded) vocabulary, before the temperature.
        sources: int64 [n], indices into the logits' leading dimensions taken as one; may repeat. None when the logits
            are the n wanted rows, in order.
        targets: int64 [n], token ids.
        temperature: the sampling temperature; logits are divided by it.
        vocab_size: real vocabulary; rows that only pad it have probability 0.
        group: tensor-parallel group; None when the logits are whole.
        with_entropy: also return the entropy of each row's distribution in nats, without gradient.

    Returns:
        float32 [n] log-probabilities (differentiable), and float32 [n] entropies or None.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}, expected more than 0")
    flat = logits.reshape(-1, logits.shape[-1])
    values, entropy = _VocabParallelLogprob.apply(flat, sources, targets, temperature, vocab_size, group, with_entropy)
    return values, entropy if with_entropy else None


class _VocabParallelLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        sources: Tensor | None,
        targets: Tensor,
        temperature: float,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        width = logits.shape[1]
        valid = min(max(vocab_size - rank * width, 0), width)
        local = targets - rank * width
        mine = (local >= 0) & (local < valid)
        local = local.clamp(0, max(valid - 1, 0))
        n = len(targets)
        lse = logits.new_full((n,), -torch.inf, dtype=torch.float32)
        # Rows: the target's logit, this rank's share of the sum of exponentials, and of the mean logit.
        parts = logits.new_zeros((3, n), dtype=torch.float32)
        if valid:
            for piece in _pieces(n, valid):
                x = _rows(logits, sources, piece, valid, temperature)
                parts[0, piece] = x.gather(1, local[piece, None])[:, 0] * mine[piece]
                top = x.amax(1)
                x -= top[:, None]
                e = x.exp()
                total = e.sum(1)
                lse[piece] = top + total.log()
                if with_entropy:
                    parts[2, piece] = top + torch.linalg.vecdot(e, x) / total
        if size > 1:
            top = lse.clone()
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
            share = (lse - top).exp()
            parts[1], parts[2] = share, parts[2] * share
            dist.all_reduce(parts, group=group)
            lse = top + parts[1].log()
            parts[2] /= parts[1]
        ctx.save_for_backward(logits, local, mine, lse)
        ctx.sources, ctx.temperature, ctx.valid = sources, temperature, valid
        entropy = lse - parts[2]
        ctx.mark_non_differentiable(entropy)
        return parts[0] - lse, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """d log p(t) / d logit_v = ([v = t] - p(v)) / temperature."""
        logits, local, mine, lse = ctx.saved_tensors
        out = torch.zeros_like(logits)
        if ctx.valid:
            for piece in _pieces(len(lse), ctx.valid):
                scale = (grad[piece] / ctx.temperature)[:, None]
                delta = _rows(logits, ctx.sources, piece, ctx.valid, ctx.temperature)
                delta.sub_(lse[piece, None]).exp_().mul_(-scale)
                delta.scatter_add_(1, local[piece, None], scale * mine[piece, None])
                if ctx.sources is None:
                    out[piece, : ctx.valid] = delta.to(out.dtype)
                else:
                    out[:, : ctx.valid].index_add_(0, ctx.sources[piece], delta.to(out.dtype))
        return out, None, None, None, None, None, None


def _rows(logits: Tensor, sources: Tensor | None, piece: slice, valid: int, temperature: float) -> Tensor:
    """float32 copy of a piece of the wanted rows, over the temperature."""
    rows = logits[piece] if sources is None else logits[sources[piece]]
    return rows[:, :valid].float() / temperature


def _pieces(rows: int, width: int) -> list[slice]:
    step = max(1, _CHUNK_ELEMENTS // width)
    return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]
