"""Reads NeMo-RL's dump of its TensorBoard files: one JSON object, `{metric: {step: value}}`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_rl_moe.compare import config_file
from nemo_rl_moe.compare.names import ours
from nemo_rl_moe.compare.read_run_dir import planned_steps
from nemo_rl_moe.compare.run_data import MAX_STEP, Ending, RunData, Series, series
from nemo_rl_moe.errors import UserError


def is_dump(read: Any) -> bool:
    """Whether parsed JSON is such a dump: every value a map whose keys are whole numbers."""
    return (
        isinstance(read, Mapping)
        and bool(read)
        and all(isinstance(item, Mapping) and _are_steps(item) for item in read.values())
    )


def read_dump(path: Path, name: str, read: Mapping[str, Mapping[str, Any]], *, own_folder: bool) -> RunData:
    """The dump as a run.

    Raises:
        UserError: a value is not a number; names metric and step.
    """
    found: dict[str, Series] = {}
    for metric, points in read.items():
        bad = [step for step, value in points.items() if not isinstance(value, float | int | None) or _is_huge(value)]
        if bad:
            raise UserError(f"{path}: {metric} at step {bad[0]}: expected a number, got {points[bad[0]]!r}")
        if points:
            values = [math.nan if value is None else value for value in points.values()]
            found[metric] = series([int(step) for step in points], values)
    config = config_file.beside(path, own_folder=own_folder)
    return RunData(
        name,
        path,
        "NeMo-RL TensorBoard dump",
        ours(found),
        config,
        ending=Ending(planned_steps=planned_steps(config)),
    )


def _are_steps(keys: Mapping[str, Any]) -> bool:
    return all(map(str.isdecimal, keys)) and max(map(len, keys), default=0) <= len(str(MAX_STEP))


def _is_huge(value: float | None) -> bool:
    """Whether an integer has more digits than a float can hold."""
    return isinstance(value, int) and value.bit_length() > 1000
