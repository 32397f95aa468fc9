"""metrics.jsonl: one JSON object a line, each written once and never again.

Steps are explicit and rows may come in any order of steps: a validation of step 5 after training step 6 is a row like
any other. A resumed run appends, so a step that was repeated after a crash has two rows; the later one counts.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nemo_rl_moe.disk import writing
from nemo_rl_moe.errors import UserError


class MetricsLog:
    """Appends rows of metrics to a file.

    A last line that a killed process left half-written is dropped first (or ended, if only its line break was missing):
    it never was a row, and left in place it would swallow the next one.

    Args:
        path: the file; made when missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing(path):
            _repair_tail(path)
            self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one row and flushes it to the operating system.

        NaN and infinity become null, as JSON has neither, and their names are listed under `nonfinite`.

        Args:
            step: 0 before the first update, then from 1.
            metrics: numbers by name; anything that `float()` takes.

        Raises:
            CannotWrite: the disk is full or gone.
        """
        with writing(self.path):
            self._file.write(json.dumps(row(step, metrics)) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        with contextlib.suppress(OSError):  # of a row that a full disk did not take, and that was reported then
            self._file.close()


def row(step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
    """One row as JSON data.

    Raises:
        ValueError: the step is negative.
        TypeError: a value is not a number; the message has its name.
    """
    if step < 0:
        raise ValueError(f"step must be 0 or more, got {step}")
    values = {name: _number(name, value) for name, value in metrics.items()}
    bad = [name for name, value in values.items() if not math.isfinite(value)]
    result: dict[str, Any] = {"step": int(step), **values, **dict.fromkeys(bad)}
    return result | ({"nonfinite": bad} if bad else {})


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows, in the order they were written. A last line without its line break is still being written: left out.

    Raises:
        UserError: a line is not a JSON object with a `step`; names file and line.
    """
    rows = []
    lines = path.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(lines, 1):
        try:
            parsed = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}:{number}: not JSON ({error})") from error
        if not isinstance(parsed, dict) or not isinstance(parsed.get("step"), int):
            raise UserError(f"{path}:{number}: expected an object with an integer `step`, got {line[:80]!r}")
        rows.append(parsed)
    return rows


def by_step(rows: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """Metrics of each step, ascending; where a step has a metric twice, the later row's value. null reads as NaN."""
    steps: dict[int, dict[str, float]] = {}
    for entry in rows:
        values = {k: math.nan if v is None else v for k, v in entry.items() if k not in ("step", "nonfinite")}
        steps.setdefault(entry["step"], {}).update(values)
    return dict(sorted(steps.items()))


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"metric {name}: expected a number, got {value!r}") from error


def _repair_tail(path: Path) -> None:
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        content = file.read()
        tail = content[content.rfind(b"\n") + 1 :]
        if not tail:
            return
        try:
            complete = isinstance(json.loads(tail), dict)
        except ValueError:
            complete = False
        if complete:
            file.write(b"\n")
        else:
            file.truncate(len(content) - len(tail))
