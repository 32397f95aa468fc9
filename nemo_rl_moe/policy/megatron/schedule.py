"""One pass of micro-batches through Megatron's pipeline schedule: forward only, or forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_rl_moe.batch import ROUTED_EXPERTS
from nemo_rl_moe.policy.megatron.microbatch import Rows, iterate_rows
from nemo_rl_moe.policy.megatron.optimizer import Trainer
from nemo_rl_moe.policy.megatron.routing import Routing
from nemo_rl_moe.policy.packing import RankShard

T = TypeVar("T")


def run_schedule(
    trainer: Trainer,
    shard: RankShard,
    wanted: NDArray[np.bool_],
    consume: Callable[[Tensor, Tensor | None, Rows], tuple[Tensor, T]],
    *,
    forward_only: bool,
    routing: Routing = Routing.OWN,
) -> list[T]:
    """Runs all micro-batches of the shard.

    Args:
        wanted: bool [T], tokens whose log-probability is wanted.
        consume: (logits [..., V / tp], which of their rows predict `rows.targets` (None: all, in order), rows) ->
            (scalar whose gradient is taken, anything). The schedule divides the scalar in place by the number of
            micro-batches.
        routing: which experts tokens go to, and whether that is recorded (`trainer.replay`).

    Returns:
        What `consume` gave second, for each micro-batch; empty unless this is the last pipeline stage.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(rows_iterator: Any, chunk: Any) -> tuple[Tensor, Callable]:
        rows = next(rows_iterator)
        sources = trainer.head.pick(rows.sources)
        if replay is None:
            output = chunk(**model_inputs(rows))
        else:
            replay.load(rows.routes)
            output = chunk(**model_inputs(rows))
            replay.unload(rows.tokens.shape)
        return output, lambda logits: consume(logits, sources, rows)

    shard = trainer.equal_rows.apply(shard, trainer.device)
    trainer.slots += sum(m.rows * m.row_length for m in shard.microbatches)
    first = shard.microbatches[0]
    replay = trainer.replay
    if replay is not None:
        replay.begin(routing, training=not forward_only)
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterate_rows(shard, wanted, trainer.device, mark_pads=trainer.equal_rows.pads),
        model=trainer.model,
        num_microbatches=len(shard.microbatches),
        seq_length=first.row_length,
        micro_batch_size=first.rows,
        forward_only=forward_only,
    )


def recorded_routing(trainer: Trainer, shard: RankShard) -> Routing:
    """Replay where the trainer does it and the shard carries routes, else the router's own choice."""
    carried = ROUTED_EXPERTS in shard.batch.token_values
    return Routing.REPLAY if trainer.replay is not None and carried else Routing.OWN


def model_inputs(rows: Rows) -> dict[str, Any]:
    """Arguments of GPTModel.forward.

    Attention knows packed sequences by their boundaries, on a GPU through Transformer Engine and on a CPU through the
    local attention: either is the block-diagonal causal mask without its zeros. Padded rows have their pads on the
    right, where a causal mask already hides them.
    """
    inputs: dict[str, Any] = {"input_ids": rows.tokens, "position_ids": rows.position_ids, "attention_mask": None}
    if rows.pads is not None:
        inputs["padding_mask"] = rows.pads
    if rows.packed:
        inputs["packed_seq_params"] = _packed_sequence_parameters(rows)
    return inputs


def sequence_ends(rows: Rows) -> list[int]:
    """Where each packed sequence starts, and the end of the row: pads lengthen the last sequence, behind its tokens.

    A family with a shared prompt counts as one sequence, its pads as one more.
    """
    slots = rows.tokens.shape[1]
    if rows.families:
        families = with_pads(rows.families, slots)
        return np.cumsum([0, *(prompt + sum(responses) for prompt, responses in families)]).tolist()
    return [*np.cumsum([0, *rows.lengths[:-1]]).tolist(), slots]


def _packed_sequence_parameters(rows: Rows) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = sequence_ends(rows)
    longest = int(np.diff(ends).max())
    boundaries = torch.tensor(ends, dtype=torch.int32, device=rows.tokens.device)
    parameters = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    # Only the local attention knows families; Megatron hands the object through as it is.
    parameters.families = with_pads(rows.families, rows.tokens.shape[1])
    return parameters


def with_pads(families: tuple[tuple[int, tuple[int, ...]], ...], slots: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The families of a row of so many slots, with its pads as one more; empty stays empty."""
    pads = slots - sum(prompt + sum(responses) for prompt, responses in families)
    return (*families, (0, (pads,))) if families and pads else families
