"""Writes that fail, in words: which file, why, and what space is left."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from nemo_rl_moe.errors import RunFailed

# A full file system still has a few blocks that no write of ours fits into.
_FULL_BELOW_BYTES = 1 << 16


class CannotWrite(RunFailed):
    """A file of the run cannot be written: the disk is full, has become read-only, or is gone."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError of the block into a `CannotWrite` that names the path, the reason and the space that is left."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        space = f" ({free_space(path)})" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise CannotWrite(f"cannot write {path}: {reason}{space}") from error


def is_full(path: Path) -> bool:
    """Whether the file system that holds the path has no room left; False where it does not say."""
    try:
        return shutil.disk_usage(_existing(path)).free < _FULL_BELOW_BYTES
    except OSError:
        return False


def free_space(path: Path) -> str:
    """Free and total size of the file system that holds the path."""
    try:
        usage = shutil.disk_usage(_existing(path))
    except OSError:
        return "free space unknown"
    return f"{_amount(usage.free)} free of {_amount(usage.total)}"


def _existing(path: Path) -> Path:
    return next((folder for folder in (path, *path.absolute().parents) if folder.exists()), Path("/"))


def _amount(size: float) -> str:
    units = ["B", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"
