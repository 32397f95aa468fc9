"""Which layers each pipeline stage holds, and how many micro-batches' activations it keeps."""

from __future__ import annotations

from functools import lru_cache

from nemo_rl_moe.recipe.schema.policy import MegatronConfig


def pipeline_slots(num_layers: int, megatron: MegatronConfig) -> int:
    """What is divided over the pipeline: the layers, and embedding and loss where they count as one each."""
    accounted = megatron.account_for_embedding_in_pipeline_split + megatron.account_for_loss_in_pipeline_split
    return num_layers + accounted


def virtual_stages(num_layers: int, megatron: MegatronConfig) -> int:
    """Model chunks of a pipeline rank (VPP): 1 without an interleaved schedule."""
    size = megatron.num_layers_per_virtual_pipeline_stage
    return 1 if size is None else pipeline_slots(num_layers, megatron) // megatron.pipeline_model_parallel_size // size


def stage_chunks(num_layers: int, megatron: MegatronConfig) -> list[list[range]]:
    """Layers of every stage, one range for each of its model chunks.

    Without virtual stages a stage is one chunk. With them chunk c of stage s is the (c x PP + s)-th of the model
    (interleaved schedule, arXiv:2104.04473, section 2.2). The recipe's rules have checked that the numbers divide.
    """
    return _chunks(
        num_layers,
        pipeline_slots(num_layers, megatron),
        int(megatron.account_for_embedding_in_pipeline_split),
        megatron.pipeline_model_parallel_size,
        megatron.num_layers_per_virtual_pipeline_stage,
        megatron.num_layers_in_first_pipeline_stage,
        megatron.num_layers_in_last_pipeline_stage,
    )


@lru_cache(maxsize=1024)
def _chunks(
    num_layers: int, slots: int, before: int, stages: int, size: int | None, first: int | None, last: int | None
) -> list[list[range]]:
    if size is not None or slots > num_layers:
        per_stage = 1 if size is None else slots // stages // size
        size = slots // stages if size is None else size
        # A slot is a layer, but for the first (the embedding) and the last (the loss) where they count as one.
        starts = [[(chunk * stages + stage) * size - before for chunk in range(per_stage)] for stage in range(stages)]
        return [[range(max(start, 0), min(start + size, num_layers)) for start in own] for own in starts]
    even = stages - (first is not None) - (last is not None)
    rest = (num_layers - (first or 0) - (last or 0)) // max(even, 1)
    sizes = [rest] * stages
    if first is not None:
        sizes[0] = first
    if last is not None:
        sizes[-1] = last
    starts_at = [sum(sizes[:stage]) for stage in range(stages)]
    return [[range(start, start + size)] for start, size in zip(starts_at, sizes, strict=True)]


def chunks_in_flight(stage: int, stages: int, chunks: int, micro_batches: int, *, overlap: bool = False) -> int:
    """Model chunks of one stage whose activations are in memory at once, at most.

    One-forward-one-backward keeps one micro-batch for each stage that comes after, and its own. The interleaved
    schedule warms up with 2 x (stages after) + (chunks - 1) x stages chunks and then runs one more; with the experts'
    all-to-all overlapped it runs one further ahead.
    """
    if chunks == 1:
        return min(stages - stage, micro_batches)
    return min(2 * (stages - stage - 1) + (chunks - 1) * stages + 1 + overlap, micro_batches * chunks)
