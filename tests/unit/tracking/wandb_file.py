"""Reads back what the real W&B library wrote offline: a log of protobuf records in LevelDB's block format."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

_FILE_HEADER, _BLOCK, _RECORD_HEADER = 7, 32768, 7


def records(path: Path) -> Iterator[Record]:
    """Records of a .wandb file. Chunks: crc32 u32, length u16, type u8 (1 whole, 2 first, 3 middle, 4 last)."""
    data, position, parts = path.read_bytes(), _FILE_HEADER, b""
    while position + _RECORD_HEADER <= len(data):
        if _BLOCK - position % _BLOCK < _RECORD_HEADER:
            position += _BLOCK - position % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        if kind == 0:
            break
        parts += data[position + _RECORD_HEADER : position + _RECORD_HEADER + length]
        position += _RECORD_HEADER + length
        if kind in (1, 4):
            yield Record.FromString(parts)
            parts = b""


def finished_records(path: Path, wait_s: float = 30.0) -> list[Record]:
    """Records once the last one is there: W&B's own process still writes for a moment after `finish()` has returned."""
    until = time.monotonic() + wait_s
    while time.monotonic() < until:
        found = list(records(path))
        if any(record.WhichOneof("record_type") == "exit" for record in found):
            return found
        time.sleep(0.05)
    raise AssertionError(f"{path} has no exit record after {wait_s:g} s")


def history(path: Path) -> list[dict[str, Any]]:
    """Every logged row, without W&B's own fields."""
    rows = []
    for record in finished_records(path):
        if record.WhichOneof("record_type") == "history":
            items = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
            rows.append({key: value for key, value in items.items() if not key.startswith("_")})
    return rows


def config(path: Path) -> dict[str, Any]:
    """The run's configuration."""
    for record in finished_records(path):
        if record.WhichOneof("record_type") == "run":
            return {(u.key or "/".join(u.nested_key)): json.loads(u.value_json) for u in record.run.config.update}
    raise AssertionError(f"no run record in {path}")
