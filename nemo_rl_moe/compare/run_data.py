"""What a comparison knows of a run, whatever file it was read from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Series(NamedTuple):
    """One metric over the steps that logged it.

    Attributes:
        steps: int64 [N], ascending, each once; the numbers the run itself logged.
        values: float64 [N]; NaN where the run logged something that is not finite.
    """

    steps: NDArray[np.int64]
    values: NDArray[np.float64]


@dataclass(frozen=True)
class Ending:
    """How a run ended, or that it has not.

    Attributes:
        state: `unknown` for exports, which do not say.
        cause: in two or three words (`out of memory`), None for runs that are done or still going on.
        reason: what the run itself said, in one line.
        planned_steps: last step it was to do; None when no configuration says.
    """

    state: Literal["done", "failed", "interrupted", "killed", "running", "unknown"] = "unknown"
    cause: str | None = None
    reason: str | None = None
    planned_steps: int | None = None


@dataclass(frozen=True)
class RunData:
    """A run to compare.

    Attributes:
        name: as shown in tables.
        path: where it was read.
        source: kind of the file, for the report.
        series: by our metric names.
        config: resolved configuration as nested maps; None when the source has none.
        environment: versions, host, devices and code, by dotted name; None when the source has none.
        ending: how it ended.
        samples: folder of `step_<n>.jsonl` files with sampled responses; None without.
        flaws: what could not be read, one sentence each.
        notes: what a reader should know of how it was read.
    """

    name: str
    path: Path
    source: str
    series: Mapping[str, Series]
    config: Mapping[str, Any] | None = None
    environment: Mapping[str, Any] | None = None
    ending: Ending = field(default_factory=Ending)
    samples: Path | None = None
    flaws: Sequence[str] = ()
    notes: Sequence[str] = ()

    @property
    def training_steps(self) -> NDArray[np.int64]:
        """Steps that have a step time or a reward: those that were trained, not only validated."""
        known = [self.series[name].steps for name in TRAINING_METRICS if name in self.series]
        return np.unique(np.concatenate(known)) if known else np.zeros(0, dtype=np.int64)


# Numbers of the rows, steps, values; all of one length.
_Block = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]
TRAINING_METRICS = ("timing/train/total_step_time", "train/reward", "train/loss")
# A number beyond it in a `step` is damage, and would make arrays of that length.
MAX_STEP = 1_000_000_000


def columns(rows: Iterable[Mapping[str, Any]], step_key: str) -> dict[str, Series]:
    """Rows of metrics as one series for each metric.

    Args:
        rows: each with its step under `step_key`; of two values for one step the later row's counts. None reads as a
            value that was not finite; values that are not numbers are left out.
    """
    # A row of each kind (a step, a step with validation) has the same keys: whole blocks of rows become arrays at once.
    alike: dict[tuple[str, ...], tuple[list[int], list[Sequence[Any]]]] = {}
    for number, row in enumerate(rows):
        numbers, values = alike.setdefault(tuple(row), ([], []))
        numbers.append(number)
        values.append(list(row.values()))
    found: dict[str, list[_Block]] = {}
    for names, (numbers, values) in alike.items():
        block = dict(zip(names, _transposed(values), strict=True))
        steps = np.asarray(block.pop(step_key), dtype=np.int64)
        for name, column in block.items():
            # Only a column with something that is no number holds objects.
            clean = column.dtype != object
            kept = np.ones(len(column), dtype=bool) if clean else np.array([cell is not None for cell in column])
            if kept.any():
                at = np.asarray(numbers)[kept]
                found.setdefault(name, []).append((at, steps[kept], column[kept].astype(np.float64)))
    return {name: _joined(blocks) for name, blocks in found.items()}


def _transposed(values: list[Sequence[Any]]) -> list[NDArray[Any]]:
    """Columns of a block of rows: float64, or objects with None in place of what is no number."""
    try:
        return list(np.array(values, dtype=np.float64).T)
    except (TypeError, ValueError, OverflowError):
        return [_numbers(column) for column in zip(*values, strict=True)]


def _numbers(column: Sequence[Any]) -> NDArray[Any]:
    cells = [np.nan if cell is None else _float(cell) if isinstance(cell, float | int) else None for cell in column]
    return np.array(cells, dtype=object)


def _float(cell: float) -> float:
    """An integer of 400 digits is as infinite as a float can say."""
    try:
        return float(cell)
    except OverflowError:
        return math.inf


def _joined(blocks: list[_Block]) -> Series:
    """One series of blocks whose rows alternate, in the order of the rows."""
    numbers, steps, values = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    order = np.argsort(numbers, kind="stable") if len(blocks) > 1 else slice(None)
    return series(steps[order], values[order])


def series(steps: Sequence[int] | NDArray[np.int64], values: Sequence[float] | NDArray[np.float64]) -> Series:
    """Sorts by step; of several values for one step the last counts; infinities become NaN."""
    at, value = np.asarray(steps, dtype=np.int64), np.array(values, dtype=np.float64)
    if len(at) > 1 and not np.all(np.diff(at) > 0):
        order = np.argsort(at, kind="stable")
        at, value = at[order], value[order]
        last = np.append(np.diff(at) > 0, True)
        at, value = at[last], value[last]
    value[~np.isfinite(value)] = np.nan
    return Series(at, value)


def as_map(value: Any) -> Mapping[str, Any]:
    """A map as it is, anything else as an empty one: files of other programs hold what they hold."""
    return value if isinstance(value, Mapping) else {}


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of every leaf of nested maps; an empty map is a leaf."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from leaves(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value
