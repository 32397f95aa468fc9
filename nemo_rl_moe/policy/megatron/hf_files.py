"""Hugging Face checkpoints on disk: where they are, what their files hold, and writing one from several processes.

File format: 8 bytes little-endian length, that many bytes of JSON (name -> dtype, shape, byte range), then the tensors
without gaps (github.com/huggingface/safetensors). Files are written in place through a shared mapping, so that every
trainer rank puts its own slices where they belong and nothing is gathered in one process.
"""

from __future__ import annotations

import json
import math
import mmap
import re
import shutil
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_rl_moe.errors import UserError

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_INDEX_FILE = "model.safetensors.index.json"
MAX_FILE_BYTES = 5 * 10**9
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")

Index = tuple[slice, ...]
Spec = tuple[str, torch.dtype, tuple[int, ...]]


def model_folder(name: str | Path) -> Path:
    """The folder of a model given as a folder or a hub id; a hub id is downloaded unless it is in the local cache.

    Raises:
        UserError: there is no such folder, and the hub gave none either.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or not _HUB_ID.fullmatch(str(name)):
        raise UserError(f"policy.model_name: {name}: no such folder; expected a Hugging Face model folder or a hub id")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(name), allow_patterns=list(_HUB_FILES)))
    except Exception as error:
        # The hub's client raises many kinds (offline, unknown, gated, HTTP); all mean that the model cannot be had.
        raise UserError(
            f"policy.model_name: {name}: neither a folder nor a model that the hub gives: {error}"
        ) from error


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        file: path of the safetensors file.
        dtype: format name in the file, such as `BF16`.
        shape: full shape.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]


class CheckpointReader:
    """Reads slices of tensors; files are opened once and mapped, so a slice costs what it holds.

    Args:
        folder: model folder.

    Raises:
        UserError: no safetensors files, one named in the index is missing, or one is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self._open: dict[Path, Any] = {}
        for file in _files(folder):
            for name, entry in _header(file).items():
                self.tensors[name] = StoredTensor(file, entry["dtype"], tuple(entry["shape"]))

    def read(self, name: str, index: Index) -> Tensor:
        """The part of the tensor at the index, in the file's dtype."""
        from safetensors import safe_open

        file = self.tensors[name].file
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file].get_slice(name)[index]


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX_FILE
    if index.is_file():
        files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
        missing = [f.name for f in files if not f.is_file()]
        if missing:
            raise UserError(f"{index}: names files that are not there: {', '.join(missing)}")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"{folder}: no *.safetensors files; expected the weights of a Hugging Face model in that format"
        )
    return files


def _header(file: Path) -> dict[str, Any]:
    try:
        with open(file, "rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > file.stat().st_size:
                raise ValueError(f"header of {length} bytes in a file of {file.stat().st_size}")
            header = json.loads(stream.read(length))
        end = 8 + length + max((e["data_offsets"][1] for n, e in header.items() if n != "__metadata__"), default=0)
        if end > file.stat().st_size:
            raise ValueError(f"it was cut off: {file.stat().st_size} bytes of {end}")
    except (struct.error, ValueError) as error:
        raise UserError(f"{file}: not a safetensors file: {error}") from None
    header.pop("__metadata__", None)
    bad = [f"{name} ({entry['dtype']})" for name, entry in header.items() if entry["dtype"] not in _DTYPES]
    if bad:
        raise UserError(
            f"{file}: {len(bad)} tensors of a format that cannot be trained, such as {bad[0]}; "
            f"expected {', '.join(_DTYPES)}"
        )
    return header


def plan_files(specs: Sequence[Spec], max_bytes: int = MAX_FILE_BYTES) -> dict[str, list[Spec]]:
    """Splits the tensors, in order, over files of at most `max_bytes` (a larger tensor has its own file).

    Returns:
        File name -> its tensors; names as transformers writes them.
    """
    parts: list[list[Spec]] = [[]]
    filled = 0
    for spec in specs:
        size = _nbytes(spec)
        if parts[-1] and filled + size > max_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(spec)
        filled += size
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, 1)}


def create_files(folder: Path, plan: Mapping[str, Sequence[Spec]]) -> None:
    """Writes the headers and makes room for the tensors, which are zero until written; and the index of many files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, specs in plan.items():
        header = _encode_header(specs)
        with open(folder / name, "wb") as stream:
            stream.write(header)
            stream.truncate(len(header) + sum(map(_nbytes, specs)))
    if len(plan) > 1:
        total = sum(_nbytes(spec) for specs in plan.values() for spec in specs)
        weight_map = {spec[0]: name for name, specs in plan.items() for spec in specs}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / _INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


class MappedCheckpoint:
    """The files of `create_files`, mapped for writing; several processes may write different parts at a time.

    Attributes:
        views: tensor name -> view into the file with the tensor's dtype and shape.
    """

    def __init__(self, folder: Path, plan: Mapping[str, Sequence[Spec]]) -> None:
        self.views: dict[str, Tensor] = {}
        self._maps: list[mmap.mmap] = []
        for name, specs in plan.items():
            with open(folder / name, "r+b") as stream:
                mapped = mmap.mmap(stream.fileno(), 0)
            self._maps.append(mapped)
            data = torch.from_numpy(np.frombuffer(mapped, dtype=np.uint8))
            start = len(_encode_header(specs))
            for spec in specs:
                end = start + _nbytes(spec)
                self.views[spec[0]] = data[start:end].view(spec[1]).view(spec[2])
                start = end

    def flush(self) -> None:
        """Returns when what this process wrote is on disk."""
        for mapped in self._maps:
            mapped.flush()


def copy_side_files(source: Path, destination: Path) -> None:
    """Copies configuration and tokenizer: all that is in a model folder but weights."""
    for file in source.iterdir():
        if file.is_file() and not _is_weights(file.name):
            shutil.copyfile(file, destination / file.name)


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json"))


def _nbytes(spec: Spec) -> int:
    return spec[1].itemsize * math.prod(spec[2])


def _encode_header(specs: Iterable[Spec]) -> bytes:
    names = {dtype: name for name, dtype in _DTYPES.items()}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        end = offset + _nbytes(spec)
        entries[spec[0]] = {"dtype": names[spec[1]], "shape": list(spec[2]), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Spaces make the header a multiple of 8 bytes, so that every tensor is aligned to its elements.
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
