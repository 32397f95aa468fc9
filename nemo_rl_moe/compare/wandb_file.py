"""What W&B writes offline: protobuf records in LevelDB's block format. Needs the wandb package for the records."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_rl_moe.errors import UserError

_FILE_HEADER, _BLOCK, _RECORD_HEADER = 7, 32768, 7
_WHOLE, _LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    """Records of a `.wandb` file, up to the first that is not complete: a run that was killed leaves half a record.

    Chunks: crc32 u32 of type and data, length u16, type u8 (1 whole, 2 first, 3 middle, 4 last), data; none crosses a
    32 KiB block.

    Raises:
        UserError: the file is no W&B log, or the wandb package is missing.
    """
    try:
        from google.protobuf.message import DecodeError
        from wandb.proto.wandb_internal_pb2 import Record
    except ImportError as error:
        raise UserError(f"{path}: reading W&B's offline files needs the wandb package (pip install wandb)") from error
    data = path.read_bytes()
    if data[:4] != b":W&B":
        raise UserError(f"{path}: not a W&B log, expected it to begin with ':W&B'")
    position, parts = _FILE_HEADER, b""
    while position + _RECORD_HEADER <= len(data):
        if _BLOCK - position % _BLOCK < _RECORD_HEADER:
            position += _BLOCK - position % _BLOCK
            continue
        checksum, length, kind = struct.unpack_from("<IHB", data, position)
        chunk = data[position + _RECORD_HEADER : position + _RECORD_HEADER + length]
        if kind == 0 or len(chunk) < length:
            return
        position += _RECORD_HEADER + length
        if zlib.crc32(chunk, zlib.crc32(bytes([kind]))) != checksum:
            if not data[position:].strip(b"\0"):
                return
            raise UserError(f"{path}: damaged before byte {position}, the checksum of a record is wrong")
        parts += chunk
        if kind in (_WHOLE, _LAST):
            try:
                yield Record.FromString(parts)
            except DecodeError as error:
                raise UserError(f"{path}: broken record before byte {position} ({error})") from error
            parts = b""


def items(entries: Any) -> dict[str, Any]:
    """Keys and JSON values of a record's items or updates; a nested key is joined by slashes, as in the log call."""
    return {entry.key or "/".join(entry.nested_key): json.loads(entry.value_json) for entry in entries}
