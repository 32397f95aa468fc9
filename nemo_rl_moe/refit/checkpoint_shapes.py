"""What a checkpoint holds, from the headers of its safetensors files alone."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

from nemo_rl_moe.refit.layout import group_elements


def checkpoint_elements(model_name: str) -> dict[str, int]:
    """Elements by tensor group (see `group_elements`) of all `*.safetensors` of the model.

    Empty when there are none: then the receiver has nothing to compare an update with.

    Args:
        model_name: a folder, or a hub id that is in the local cache.

    Raises:
        ValueError: a file is not in the safetensors format.
    """
    sizes: list[tuple[str, int]] = []
    for file in sorted(_folder(model_name).glob("*.safetensors")):
        header = _read_header(file)
        sizes += [(name, math.prod(entry["shape"])) for name, entry in header.items() if name != "__metadata__"]
    return group_elements(sizes)


def _folder(model_name: str) -> Path:
    if Path(model_name).is_dir():
        return Path(model_name)
    from huggingface_hub import snapshot_download

    # The engine has loaded it by now, so the cache has it.
    return Path(snapshot_download(model_name, local_files_only=True))


def _read_header(file: Path) -> dict:
    """Format: 8 bytes little-endian length, then that many bytes of JSON (github.com/huggingface/safetensors)."""
    with open(file, "rb") as stream:
        try:
            (length,) = struct.unpack("<Q", stream.read(8))
            return json.loads(stream.read(length))
        except (struct.error, ValueError, OverflowError, MemoryError) as error:
            raise ValueError(f"{file}: not a safetensors file: {error}") from error
