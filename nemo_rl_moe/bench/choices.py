"""Checks of what a user chose, shared by the bench commands."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from nemo_rl_moe.errors import UserError


def nearest_choice(what: str, value: str, known: Iterable[str]) -> None:
    """Refuses a value that is not among the known ones.

    Raises:
        UserError: names the value, the nearest known one where there is one, and all of them.
    """
    names = list(known)
    if value in names:
        return
    near = difflib.get_close_matches(value, names, 1)
    meant = f"did you mean {near[0]}? " if near else ""
    raise UserError(f"{what} {value!r} is not known: {meant}expected one of {', '.join(names)}")
