"""Rows of one length on all ranks of an expert group, which HybridEP's kernels need and do not check.

Packed rows have the length of what is in them, so the ranks of an expert group hold different numbers of tokens. With
prepadding (`policy.megatron_cfg.moe_hybridep_prepad_packed_inputs`) the ranks agree before the forward pass on the
longest row of each micro-batch, rounded up, and pad to it: one MAX all-reduce of a number for each micro-batch, where
megatron-core's own padding makes one in every layer. Pads lengthen the last sequence of a row, behind its tokens, where
causality hides them, and no pad is routed to an expert.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_moe.errors import UserError
from nemo_rl_moe.policy.packing import RankShard
from nemo_rl_moe.recipe.hybrid_ep import backend_is_hybrid_ep, prepad_multiple
from nemo_rl_moe.recipe.schema.policy import MegatronConfig


class EqualRows:
    """Makes the rows of an expert group equal, or checks that they are, as the recipe says.

    Args:
        cfg: the trainer's settings.

    Attributes:
        pads: whether rows are padded, so that the model must be told which slots are pads.
    """

    def __init__(self, cfg: MegatronConfig) -> None:
        self.pads = cfg.moe_hybridep_prepad_packed_inputs
        self._checks = backend_is_hybrid_ep(cfg) and not self.pads
        self._multiple = prepad_multiple(cfg)

    def apply(self, shard: RankShard, device: torch.device) -> RankShard:
        """The shard with the row lengths that its micro-batches are to have. Collective over the expert group.

        Raises:
            UserError: rows differ in length, HybridEP runs and prepadding is off: it would hang or mix up tokens.
        """
        if not (self.pads or self._checks):
            return shard
        from megatron.core import parallel_state as mpu

        group = mpu.get_expert_tensor_and_model_parallel_group()
        own = torch.tensor([m.rows * m.row_length for m in shard.microbatches], dtype=torch.int64, device=device)
        if self._checks:
            _refuse_unequal(own, group)
            return shard
        longest = _maximum(own, group).tolist()
        padded = [
            replace(m, row_length=-(-length // self._multiple) * self._multiple)
            for m, length in zip(shard.microbatches, longest, strict=True)
        ]
        return replace(shard, microbatches=tuple(padded))


def keep_pads_from_experts(model: Iterable[Any]) -> None:
    """From now on a slot that `padding_mask` marks is routed to no expert.

    Megatron leaves pads out of its balancing losses only, and sends them to experts like tokens: all of them to the
    same few, since they are all alike.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                module.register_forward_hook(_mask_routes, with_kwargs=True)


def _mask_routes(
    _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor] | None:
    mask = kwargs.get("padding_mask", args[1] if len(args) > 1 else None)
    if mask is None:
        return None
    probs, routes = output
    # [S, B] as the hidden states; probabilities and routes are [S * B, experts].
    real = ~mask.reshape(-1, 1)
    return probs * real, routes & real


def _maximum(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    result = values.clone()
    dist.all_reduce(result, dist.ReduceOp.MAX, group=group)
    return result


def _refuse_unequal(own: Tensor, group: dist.ProcessGroup) -> None:
    largest, smallest = _maximum(torch.stack((own, -own)), group).tolist()
    unequal = [(i, -low, high) for i, (high, low) in enumerate(zip(largest, smallest, strict=True)) if high != -low]
    if unequal:
        i, low, high = unequal[0]
        raise UserError(
            f"micro-batch {i}: ranks of one expert group hold {low} to {high} tokens, and HybridEP needs one number on "
            "all of them; set policy.megatron_cfg.moe_hybridep_prepad_packed_inputs true"
        )
