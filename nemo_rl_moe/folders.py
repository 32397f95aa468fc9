"""Folders that bear their name only while they are whole, whenever the process is killed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_DOOMED = "tmp_old_"


def put_in_place(partial: Path, final: Path) -> None:
    """Gives a finished folder its name; what bore the name before is removed."""
    doomed = _set_aside(final)
    os.replace(partial, final)
    shutil.rmtree(doomed, ignore_errors=True)


def remove(folder: Path) -> None:
    """Removes a folder. Its name goes first: a removal that is cut off leaves no half folder under it."""
    shutil.rmtree(_set_aside(folder), ignore_errors=True)


def remove_leftovers(parent: Path) -> None:
    """Finishes removals in the folder that were cut off."""
    for doomed in parent.glob(f"{_DOOMED}*"):
        shutil.rmtree(doomed, ignore_errors=True)


def _set_aside(folder: Path) -> Path:
    doomed = folder.with_name(_DOOMED + folder.name)
    # Left by a removal that was cut off; a folder cannot be renamed to one that holds files.
    shutil.rmtree(doomed, ignore_errors=True)
    if folder.exists():
        os.replace(folder, doomed)
    return doomed
