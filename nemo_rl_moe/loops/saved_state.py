"""What a checkpoint says of itself beside the trainer's files, and whether those files are still what was written.

The trainer's format has no check sums: a block that reads back as zeros would be loaded as weights.
"""

from __future__ import annotations

import json
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_rl_moe.errors import UserError

STATE_FILE = "training_state.json"
TRAINER = "policy"
# Longer files are sampled, for a check must not take minutes: as many stretches of this length, evenly spread.
_STRETCHES, _STRETCH_BYTES = 16, 4 << 20
_READERS = 8


@dataclass(frozen=True)
class SavedState:
    """A complete checkpoint.

    Attributes:
        step: the step after which it was saved.
        weight_version: of the saved weights.
        loader: state of the training prompts.
        metrics: of the step, as far as they were known.
        files: size in bytes and CRC-32 of each of the trainer's files, by path within the checkpoint.
    """

    step: int
    weight_version: int
    loader: dict[str, Any]
    metrics: dict[str, float]
    files: dict[str, tuple[int, str]]


def write_state(folder: Path, **fields: Any) -> None:
    """Writes the state of a checkpoint whose trainer's files are all there. Fields are those of `SavedState`."""
    state = SavedState(**fields, files=_fingerprints(folder))
    (folder / STATE_FILE).write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")


def read_state(folder: Path, step: int) -> SavedState:
    """Reads the state and compares the trainer's files with it.

    Raises:
        UserError: naming the first file that is missing or not what was written.
    """
    path = folder / STATE_FILE
    try:
        state = SavedState(**json.loads(path.read_text(encoding="utf-8")))
        damage = _damage(folder, state.files)
    except (ValueError, TypeError, AttributeError) as error:
        raise _damaged(folder, f"{STATE_FILE} is not a checkpoint's ({error})") from error
    except OSError as error:
        raise _damaged(folder, f"{error.filename}: {error.strerror}") from error
    if state.step != step:
        raise UserError(f"{path}: says step {state.step}, expected {step}")
    if damage:
        raise _damaged(folder, damage)
    return state


def saved_metrics(folder: Path) -> dict[str, float]:
    """Metrics of a checkpoint; none where its state cannot be read."""
    try:
        return dict(json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))["metrics"])
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def _damaged(folder: Path, what: str) -> UserError:
    return UserError(
        f"{folder}: the checkpoint is damaged: {what}; remove the folder to resume from the one before it, if any"
    )


def _damage(folder: Path, files: dict[str, Any]) -> str | None:
    found = _fingerprints(folder)
    for name, (size, crc) in files.items():
        if name not in found:
            return f"{name} is missing"
        if found[name][0] != size:
            return f"{name} has {found[name][0]} bytes, expected {size}"
        if found[name][1] != crc:
            return f"{name} is not what was written (CRC-32 {found[name][1]}, expected {crc})"
    return None


def _fingerprints(folder: Path) -> dict[str, tuple[int, str]]:
    paths = sorted(path for path in (folder / TRAINER).rglob("*") if path.is_file())
    with ThreadPoolExecutor(_READERS) as readers:
        return {
            str(path.relative_to(folder)): found
            for path, found in zip(paths, readers.map(_fingerprint, paths), strict=True)
        }


def _fingerprint(path: Path) -> tuple[int, str]:
    """Size, and CRC-32 of the content, or of 16 stretches of 4 MiB where it is longer than they are."""
    size = path.stat().st_size
    last = size - _STRETCH_BYTES
    if size <= _STRETCHES * _STRETCH_BYTES:
        starts = list(range(0, size, _STRETCH_BYTES))
    else:
        starts = [last * i // (_STRETCHES - 1) for i in range(_STRETCHES)]
    crc = 0
    with path.open("rb") as file:
        for start in starts:
            file.seek(start)
            crc = zlib.crc32(file.read(_STRETCH_BYTES), crc)
    return size, f"{crc:08x}"
