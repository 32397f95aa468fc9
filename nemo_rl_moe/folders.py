"""Folders that bear their name only while they are whole, whenever the process is killed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_DOOMED, _PARTIAL = "tmp_old_", "tmp_"


def partial(final: Path) -> Path:
    """Where a folder is filled before it gets its name."""
    return final.with_name(_PARTIAL + final.name)


def put_in_place(partial: Path, final: Path) -> None:
    """Gives a finished folder its name; what bore the name before is removed."""
    doomed = _set_aside(final)
    os.replace(partial, final)
    shutil.rmtree(doomed, ignore_errors=True)


def remove(folder: Path) -> None:
    """Removes a folder. Its name goes first: a removal that is cut off leaves no half folder under it."""
    shutil.rmtree(_set_aside(folder), ignore_errors=True)


def remove_leftovers(parent: Path, names: str) -> None:
    """Removes what was cut off while it was filled or removed, of folders whose names match the pattern."""
    for prefix in (_DOOMED, _PARTIAL):
        for leftover in parent.glob(prefix + names):
            shutil.rmtree(leftover, ignore_errors=True)


def _set_aside(folder: Path) -> Path:
    doomed = folder.with_name(_DOOMED + folder.name)
    # Left by a removal that was cut off; a folder cannot be renamed to one that holds files.
    shutil.rmtree(doomed, ignore_errors=True)
    if folder.exists():
        os.replace(folder, doomed)
    return doomed
