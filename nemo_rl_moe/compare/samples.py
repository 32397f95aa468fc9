"""Sampled responses of a run directory, to read: `rollouts/step_<n>.jsonl`."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_moe.compare.json_lines import read_lines

_FILE = re.compile(r"step_(\d{1,10})\.jsonl")
# A response may be a hundred thousand tokens long, and a page holds many.
_LONGEST = 6000


@dataclass(frozen=True)
class Sample:
    """One response.

    Attributes:
        problem, response: text; long ones without their middle.
        reward: None where it was not finite or not written.
        truncated: whether the length limit cut it off.
        more: whatever else was written with it, in words.
    """

    problem: str
    response: str
    reward: float | None
    truncated: bool
    more: str


def sampled_steps(folder: Path | None) -> list[int]:
    """Steps that have samples, ascending."""
    try:
        names = [] if folder is None else os.listdir(folder)
    except OSError:
        return []
    return sorted(int(found[1]) for name in names if (found := _FILE.fullmatch(name)))


def read_samples(folder: Path, step: int) -> tuple[list[Sample], list[str]]:
    """A step's samples, and a sentence on lines that are none."""
    try:
        rows, flaws = read_lines(folder / f"step_{step}.jsonl")
    except OSError as error:
        return [], [f"step_{step}.jsonl: {error.strerror}"]
    return [_sample(row) for row in rows], flaws


def _sample(row: Mapping[str, Any]) -> Sample:
    known = ("problem", "response", "reward", "truncated", "tokens_by_version")
    more = [f"{key.replace('_', ' ')} {value}" for key, value in row.items() if key not in known]
    return Sample(
        _shortened(row.get("problem")),
        _shortened(row.get("response")),
        _finite(row.get("reward")),
        row.get("truncated") is True,
        _shortened(", ".join(more), 200),
    )


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    with contextlib.suppress(OverflowError):
        return float(value) if math.isfinite(value) else None
    return None


def _shortened(value: Any, longest: int = _LONGEST) -> str:
    text = "" if value is None else str(value)
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"
