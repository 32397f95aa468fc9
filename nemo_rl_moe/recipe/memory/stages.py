"""Which layers each pipeline stage holds, and how many micro-batches' activations it keeps."""

from __future__ import annotations

from nemo_rl_moe.recipe.schema.policy import MegatronConfig


def stage_chunks(num_layers: int, megatron: MegatronConfig) -> list[list[range]]:
    """Layers of every stage, one range for each of its model chunks.

    Without virtual stages a stage is one chunk. With them chunk c of stage s is the (c x PP + s)-th of the model
    (interleaved schedule, arXiv:2104.04473, section 2.2). The recipe's rules have checked that the numbers divide.
    """
    stages = megatron.pipeline_model_parallel_size
    size = megatron.num_layers_per_virtual_pipeline_stage
    if size is not None:
        per_stage = num_layers // stages // size
        starts = [[(chunk * stages + stage) * size for chunk in range(per_stage)] for stage in range(stages)]
        return [[range(start, start + size) for start in own] for own in starts]
    first, last = megatron.num_layers_in_first_pipeline_stage, megatron.num_layers_in_last_pipeline_stage
    even = stages - (first is not None) - (last is not None)
    rest = (num_layers - (first or 0) - (last or 0)) // max(even, 1)
    sizes = [rest] * stages
    if first is not None:
        sizes[0] = first
    if last is not None:
        sizes[-1] = last
    starts_at = [sum(sizes[:stage]) for stage in range(stages)]
    return [[range(start, start + size)] for start, size in zip(starts_at, sizes, strict=True)]


def chunks_in_flight(stage: int, stages: int, chunks: int, micro_batches: int) -> int:
    """Model chunks of one stage whose activations are in memory at once, at most.

    One-forward-one-backward keeps one micro-batch for each stage that comes after, and its own. The interleaved
    schedule warms up with 2 x (stages after) + (chunks - 1) x stages chunks and then runs one more.
    """
    if chunks == 1:
        return min(stages - stage, micro_batches)
    return min(2 * (stages - stage - 1) + (chunks - 1) * stages + 1, micro_batches * chunks)
