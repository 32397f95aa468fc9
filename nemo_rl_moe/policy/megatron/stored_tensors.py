"""Where a checkpoint's files hold each tensor of the model, known from the files' headers alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nemo_rl_moe.errors import UserError
from nemo_rl_moe.policy.megatron.hf_files import CheckpointReader, Index, model_folder
from nemo_rl_moe.policy.megatron.mapping import hf_tensor_specs
from nemo_rl_moe.policy.megatron.model_shape import ModelShape, read_hf_config

_EXPERT_NAME = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_MAX_LISTED = 10


def check_model_folder(name: str, overrides: Mapping[str, Any] | None = None) -> None:
    """Checks that the files hold the model of their config.json, before any worker starts; reads headers only.

    Args:
        name: model folder or hub id.
        overrides: keys of config.json to replace first.

    Raises:
        UserError: no such model, another architecture, a damaged file, or tensors that are missing, unexpected or of
            another shape.
    """
    folder = model_folder(name)
    locate(read_hf_config(folder, overrides), CheckpointReader(folder))


@dataclass(frozen=True, slots=True)
class StoredPlace:
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


def locate(shape: ModelShape, reader: CheckpointReader) -> dict[str, StoredPlace]:
    """Hugging Face name -> where it is; checks that the files hold this model and nothing else."""
    places: dict[str, StoredPlace] = {}
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
) -> tuple[StoredPlace | None, tuple[int, ...]]:
    """Where the tensor is, None when nowhere, and the shape that the stored tensor must have."""
    if name in reader.tensors:
        return StoredPlace(name), size
    expert = _EXPERT_NAME.fullmatch(name)
    if expert is None:
        return None, size
    stem, number, part = expert[1], int(expert[2]), expert[3]
    stack = f"{stem}.{'down_proj' if part == 'down' else 'gate_up_proj'}"
    if stack not in reader.tensors:
        return None, size
    rows = size[0] if part == "down" else 2 * size[0]
    return StoredPlace(stack, number, size[0] if part == "up" else 0), (shape.num_experts, rows, size[1])


def _is_redundant(name: str, shape: ModelShape) -> bool:
    """A tied head that was saved all the same, and the rotary frequencies that old versions of transformers saved."""
    return (name == "lm_head.weight" and shape.tie_word_embeddings) or name.endswith(".rotary_emb.inv_freq")
