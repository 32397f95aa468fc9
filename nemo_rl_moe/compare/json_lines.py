"""JSON as others write it: whole files, and lines, whatever a crash, a full disk or a copy has made of some of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from nemo_rl_moe.compare.run_data import MAX_STEP, TRAINING_METRICS
from nemo_rl_moe.compare.window import ranges

Row = Mapping[str, Any]
# Five times as fast as `json.loads`, which would take most of the time of comparing two long runs.
_DECODE = msgspec.json.Decoder().decode


def read_lines(path: Path, flaw: Callable[[Row], str | None] = lambda row: None) -> tuple[list[Row], list[str]]:
    """The rows that can be read, and one sentence on the lines that cannot; none when all can.

    A last line without its line break that is no JSON is still being written, and no flaw.

    Args:
        path: the file.
        flaw: what is wrong with a row; None when nothing is.
    """
    rows: list[Row] = []
    bad: dict[int, str] = {}
    *lines, tail = path.read_bytes().split(b"\n")
    for number, line in enumerate([*lines, *([tail] if _whole(tail) else [])], 1):
        if not line.strip():
            continue
        found, wrong = _parsed(line)
        if found is None or (wrong := flaw(found)) is not None:
            bad[number] = str(wrong)
        else:
            rows.append(found)
    return rows, [_sentence(path, bad)] if bad else []


def step_flaw(row: Row) -> str | None:
    """What is wrong with a row's `step`."""
    step = row.get("step")
    if isinstance(step, bool) or not isinstance(step, int):
        return f"expected an integer `step`, got {str(step)[:40]}"
    return None if 0 <= step <= MAX_STEP else f"step {str(step)[:40]} is not from 0 to {MAX_STEP}"


def repeated(rows: list[Row], step_key: str) -> list[str]:
    """A note on steps that were trained twice, as after a resume; of those the later row counts."""
    first: set[Any] = set()
    again: set[Any] = set()
    for row in rows:
        if any(name in row for name in TRAINING_METRICS):
            step = row.get(step_key)
            (again if step in first else first).add(step)
    if not again:
        return []
    return [f"step {ranges(sorted(again))} logged more than once, as after a resume: the last row counts"]


def _whole(tail: bytes) -> bool:
    return _parsed(tail)[0] is not None


def parse(text: bytes) -> Any:
    """JSON with Python's NaN and Infinity, by the fast parser wherever there is none of these.

    Raises:
        ValueError, RecursionError: it is no JSON.
    """
    try:
        return _DECODE(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        # What is wrong, or not wrong, is for Python's own parser to say.
        return json.loads(text)


def _parsed(line: bytes) -> tuple[Row | None, str | None]:
    try:
        read = parse(line)
    except (ValueError, RecursionError) as error:
        return None, f"not JSON ({error})"
    return (read, None) if isinstance(read, dict) else (None, "expected an object")


def _sentence(path: Path, bad: Mapping[int, str]) -> str:
    first = next(iter(bad))
    lines = f"line{'s'[: len(bad) > 1]} {ranges(list(bad))}"
    return f"{path.name}: {lines} left out, no row of metrics ({path.name}:{first}: {bad[first]})"
