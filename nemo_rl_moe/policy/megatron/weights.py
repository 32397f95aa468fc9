"""Hugging Face weights <-> this rank's Megatron parameters, in both directions through one mapping (mapping.py).

Loading reads each piece's part of the files, exporting writes it into place: no rank ever holds more than its own part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_moe.errors import UserError
from nemo_rl_moe.policy.megatron import hf_files
from nemo_rl_moe.policy.megatron.hf_files import CheckpointReader, Index
from nemo_rl_moe.policy.megatron.mapping import Piece, hf_tensor_specs, map_parameters, unwrap
from nemo_rl_moe.policy.megatron.model_shape import ModelShape
from nemo_rl_moe.policy.megatron.parallel import ParallelLayout

__all__ = ["Piece", "export_into", "hf_tensor_specs", "load_hf", "map_parameters", "save_hf"]

_EXPERT_NAME = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_MAX_LISTED = 10


def load_hf(model: Sequence[Any], folder: str | Path, layout: ParallelLayout) -> None:
    """Reads this rank's part of a Hugging Face checkpoint into the model's parameters, converting to their dtype.

    Args:
        model: chunks from `build_model`, wrapped or not.
        folder: model folder or hub id; experts one by one or stacked in one tensor for each layer.

    Raises:
        UserError: tensors missing, unexpected or of another shape, all listed.
    """
    reader = CheckpointReader(hf_files.model_folder(folder))
    stored = _locate(unwrap(model[0]).hf_shape, reader)
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


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies in the files: alone, or as one expert in a stack whose rows are gate above up.

    Attributes:
        name: name in the file.
        expert: index in the stack; None when alone.
        row: first row inside the expert's matrix.
    """

    name: str
    expert: int | None = None
    row: int = 0

    def index(self, index: Index) -> Index:
        """The same part, in the stored tensor."""
        if self.expert is None:
            return index
        rows = slice(self.row + index[0].start, self.row + index[0].stop) if index[0].start is not None else index[0]
        return (slice(self.expert, self.expert + 1), rows, *index[1:])


def _locate(shape: ModelShape, reader: CheckpointReader) -> dict[str, _Place]:
    """Hugging Face name -> where it is; checks that the files hold this model and nothing else."""
    places: dict[str, _Place] = {}
    used: set[str] = set()
    missing: list[str] = []
    wrong: list[str] = []
    for name, _, size in hf_tensor_specs(shape, torch.float32):
        place, expected = _place(name, size, shape, reader)
        if place is None:
            missing.append(name)
            continue
        places[name] = place
        used.add(place.name)
        found = reader.tensors[place.name].shape
        if found != expected:
            wrong.append(f"{place.name} is {list(found)}, expected {list(expected)}")
    unexpected = [name for name in reader.tensors if name not in used and not _is_redundant(name, shape)]
    problems = [
        f"{len(names)} tensors {what}: {', '.join(names[:_MAX_LISTED])}{' ...' if len(names) > _MAX_LISTED else ''}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of the wrong shape", wrong))
        if names
    ]
    if problems:
        raise UserError(f"{reader.folder}: weights do not fit config.json\n  " + "\n  ".join(problems))
    return places


def _place(
    name: str, size: tuple[int, ...], shape: ModelShape, reader: CheckpointReader
) -> tuple[_Place | None, tuple[int, ...]]:
    """Where the tensor is, None when nowhere, and the shape that the stored tensor must have."""
    if name in reader.tensors:
        return _Place(name), size
    expert = _EXPERT_NAME.fullmatch(name)
    if expert is None:
        return None, size
    stem, number, part = expert[1], int(expert[2]), expert[3]
    stack = f"{stem}.{'down_proj' if part == 'down' else 'gate_up_proj'}"
    if stack not in reader.tensors:
        return None, size
    rows = size[0] if part == "down" else 2 * size[0]
    return _Place(stack, number, size[0] if part == "up" else 0), (shape.num_experts, rows, size[1])


def _is_redundant(name: str, shape: ModelShape) -> bool:
    """A tied head that was saved all the same, and the rotary frequencies that old versions of transformers saved."""
    return (name == "lm_head.weight" and shape.tie_word_embeddings) or name.endswith(".rotary_emb.inv_freq")
