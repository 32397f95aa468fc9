"""Hugging Face weights <-> this rank's Megatron parameters, in both directions through one mapping (mapping.py).

Loading reads each piece's part of the files, exporting writes it into place: no rank ever holds more than its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_moe.policy.megatron import hf_files
from nemo_rl_moe.policy.megatron.hf_files import CheckpointReader
from nemo_rl_moe.policy.megatron.mapping import Piece, hf_tensor_specs, map_parameters, unwrap
from nemo_rl_moe.policy.megatron.parallel import ParallelLayout
from nemo_rl_moe.policy.megatron.stored_tensors import locate

__all__ = ["Piece", "export_into", "hf_tensor_specs", "load_hf", "map_parameters", "save_hf"]


def load_hf(model: Sequence[Any], folder: str | Path, layout: ParallelLayout) -> None:
    """Reads this rank's part of a Hugging Face checkpoint into the model's parameters, converting to their dtype.

    Args:
        model: chunks from `build_model`, wrapped or not.
        folder: model folder or hub id; experts one by one or stacked in one tensor for each layer.

    Raises:
        UserError: tensors missing, unexpected or of another shape, all listed.
    """
    reader = CheckpointReader(hf_files.model_folder(folder))
    stored = locate(unwrap(model[0]).hf_shape, reader)
    with torch.no_grad():
        for parameter in _padded_parameters(model):
            # Rows that only pad the vocabulary are in no file, and the parameter's memory was never written.
            parameter.zero_()
        for piece in map_parameters(model, layout):
            place = stored[piece.name]
            target = piece.parameter[piece.index]
            target.copy_(reader.read(place.name, place.index(piece.hf_index)).reshape(target.shape))


def export_into(
    model: Sequence[Any],
    views: Mapping[str, Tensor],
    layout: ParallelLayout,
    value: Callable[[torch.nn.Parameter], Tensor] | None = None,
) -> int:
    """Writes the pieces that this rank owns into full-shaped tensors. All ranks together write every element once.

    Args:
        views: Hugging Face name -> tensor of the full shape; converted to its dtype and device.
        value: what to export of a parameter, of its shape; None is the parameter itself. Gradients, say.

    Returns:
        Elements written, so that the receiver can check that nothing is missing.
    """
    written = 0
    with torch.no_grad():
        for piece in map_parameters(model, layout):
            if piece.owned:
                source = piece.parameter if value is None else value(piece.parameter)
                target = views[piece.name][piece.hf_index]
                target.copy_(source[piece.index], non_blocking=True)
                written += target.numel()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return written


def save_hf(
    model: Sequence[Any],
    folder: str | Path,
    layout: ParallelLayout,
    source: str | Path,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = hf_files.MAX_FILE_BYTES,
) -> None:
    """Writes a Hugging Face model folder; collective, all ranks must see the same file system.

    Every rank writes its own slices into the mapped files. The files are not complete before this returns on all ranks.

    Args:
        folder: made where it is missing.
        source: the model folder or hub id from which configuration and tokenizer are copied.
        dtype: format of the tensors; None is that of the parameters.
    """
    folder = Path(folder)
    chunk = unwrap(model[0])
    plan = hf_files.plan_files(hf_tensor_specs(chunk.hf_shape, dtype or chunk.config.params_dtype), max_file_bytes)
    if layout.rank == 0:
        hf_files.create_files(folder, plan)
        hf_files.copy_side_files(hf_files.model_folder(source), folder)
    dist.barrier()
    mapped = hf_files.MappedCheckpoint(folder, plan)
    export_into(model, mapped.views, layout)
    mapped.flush()
    dist.barrier()


def _padded_parameters(model: Sequence[Any]) -> Iterator[torch.nn.Parameter]:
    for chunk in map(unwrap, model):
        for name, parameter in chunk.named_parameters():
            if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                yield parameter
