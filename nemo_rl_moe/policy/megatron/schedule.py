"""One pass of micro-batches through Megatron's pipeline schedule: forward only, or forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from nemo_rl_moe.policy.megatron.microbatch import Rows, iterate_rows
from nemo_rl_moe.policy.packing import RankShard

T = TypeVar("T")


def run_schedule(
    model: list[Any],
    shard: RankShard,
    wanted: Any,
    device: torch.device | str,
    consume: Callable[[Rows, Tensor], tuple[Tensor, T]],
    *,
    forward_only: bool,
) -> list[T]:
    """Runs all micro-batches of the shard.

    Args:
        wanted: bool [T], tokens whose log-probability is wanted.
        consume: (rows, logits [B, S, V / tp]) -> (scalar whose gradient is taken, anything). The schedule divides the
            scalar in place by the number of micro-batches.

    Returns:
        What `consume` gave second, for each micro-batch; empty unless this is the last pipeline stage.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(rows_iterator: Any, chunk: Any) -> tuple[Tensor, Callable]:
        rows = next(rows_iterator)
        return chunk(**model_inputs(rows)), partial(consume, rows)

    first = shard.microbatches[0]
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterate_rows(shard, wanted, device),
        model=model,
        num_microbatches=len(shard.microbatches),
        seq_length=first.row_length,
        micro_batch_size=first.rows,
        forward_only=forward_only,
    )


def model_inputs(rows: Rows) -> dict[str, Any]:
    """Arguments of GPTModel.forward.

    Attention knows packed sequences by their boundaries, on a GPU through Transformer Engine and on a CPU through the
    local attention: either is the block-diagonal causal mask without its zeros. Padded rows have their pads on the
    right, where a causal mask already hides them.
    """
    inputs: dict[str, Any] = {"input_ids": rows.tokens, "position_ids": rows.position_ids, "attention_mask": None}
    if rows.packed:
        inputs["packed_seq_params"] = _packed_sequence_parameters(rows)
    return inputs


def _packed_sequence_parameters(rows: Rows) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    # The pads at the end of the row form one more sequence, so that the boundaries cover the whole row.
    lengths = [*rows.lengths]
    pads = rows.tokens.shape[1] - sum(lengths)
    if pads:
        lengths.append(pads)
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(rows.tokens.device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
