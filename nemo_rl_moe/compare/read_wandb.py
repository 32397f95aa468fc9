"""Reads W&B: offline runs, and histories exported as CSV or JSON."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_rl_moe.compare import config_file
from nemo_rl_moe.compare.json_lines import repeated
from nemo_rl_moe.compare.names import ours
from nemo_rl_moe.compare.read_run_dir import planned_steps
from nemo_rl_moe.compare.run_data import MAX_STEP, Ending, RunData, Series, as_map, columns
from nemo_rl_moe.compare.wandb_file import items, records
from nemo_rl_moe.errors import UserError

# Our own runs log `step` as a metric; `_step` then only counts rows. NeMo-RL's runs have `_step` alone.
_STEP_COLUMNS = ("step", "_step", "Step", "global_step")


def read_offline(files: Sequence[Path], name: str) -> RunData:
    """Reads the `.wandb` files of one run, oldest first; a resumed run has several.

    Raises:
        UserError: a file is broken, or the wandb package is missing.
    """
    rows: list[dict[str, Any]] = []
    config: dict[str, Any] = {}
    exit_code = None
    for file in files:
        exit_code = None
        for record in records(file):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                # JSON's NaN here is a value that was logged, never an empty cell.
                rows.append({k: _number(v) for k, v in items(record.history.item).items()})
            elif kind == "run":
                config |= items(record.run.config.update)
            elif kind == "config":
                config |= items(record.config.update)
            elif kind == "exit":
                exit_code = record.exit.exit_code
    config = config_file.unwrapped(config)
    planned = planned_steps(config)
    ending = Ending(planned_steps=planned)
    if exit_code is not None:
        failed = exit_code != 0
        ending = Ending("failed" if failed else "done", "error" if failed else None, None, planned)
        if failed:
            ending = Ending("failed", "error", f"exit code {exit_code}; W&B keeps no reason", planned)
    # A run that died before its first step has logged no row.
    found, notes = _series(rows, files[-1]) if rows else ({}, [])
    environment = _metadata(files[-1].parent)
    return RunData(name, files[-1], "W&B offline run", ours(found), config or None, environment, ending, notes=notes)


def read_csv(path: Path, name: str, *, own_folder: bool) -> RunData:
    """Reads a history with a column for each metric, or a chart's export (`<run> - <metric>` columns).

    Raises:
        UserError: no step column, a value that is no number, or more than one run in the file; names file and line.
    """
    # W&B exports tables and histograms as cells of any length.
    csv.field_size_limit(1 << 27)
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        try:
            header = next(reader, [])
            known = _chart_columns(path, header) if header[:1] == ["Step"] else dict(zip(header, header, strict=True))
            names = [known.get(column) for column in header]
            rows = [_csv_row(path, reader.line_num, row, names) for row in reader if row]
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{path}:{reader.line_num + 1}: not CSV ({error})") from error
    return _history(path, name, rows, "W&B history (CSV)", own_folder=own_folder)


def read_rows(path: Path, name: str, rows: Iterable[Any], *, own_folder: bool, flaws: Sequence[str] = ()) -> RunData:
    """Reads a history that is a list of rows: what W&B's API returns, as JSON or JSON lines.

    Args:
        flaws: lines that were no rows.

    Raises:
        UserError: a row is no object, or there is no step.
    """
    kept = []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise UserError(f"{path}: row {number}: expected an object of metrics, got {str(row)[:60]!r}")
        # An export writes null (pandas: NaN) for a metric that a row does not have; W&B's own NaN is the text "NaN".
        kept.append(
            {
                name: _number(value) if isinstance(value, str) else value
                for name, value in row.items()
                if value is not None and not (isinstance(value, float) and math.isnan(value))
            }
        )
    return _history(path, name, kept, "W&B history (JSON)", own_folder=own_folder, flaws=flaws)


def table_rows(table: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of pandas' JSON, which is `{column: {row: value}}`."""
    labels = dict.fromkeys(label for column in table.values() for label in column)
    return [{name: column[label] for name, column in table.items() if label in column} for label in labels]


def step_column(names: Iterable[str]) -> str | None:
    """The column of the logged step; None when there is none."""
    known = set(names)
    return next((name for name in _STEP_COLUMNS if name in known), None)


def _history(
    path: Path, name: str, rows: list[dict[str, Any]], source: str, *, own_folder: bool, flaws: Sequence[str] = ()
) -> RunData:
    config = config_file.beside(path, own_folder=own_folder)
    found, notes = _series(rows, path)
    ending = Ending(planned_steps=planned_steps(config))
    environment = _metadata(path.parent) if own_folder else None
    return RunData(name, path, source, ours(found), config, environment, ending, flaws=flaws, notes=notes)


def _series(rows: Sequence[Mapping[str, Any]], path: Path) -> tuple[dict[str, Series], list[str]]:
    """Series by W&B's names, and notes."""
    step = step_column(key for row in rows for key in row)
    if not rows:
        raise UserError(f"{path}: holds no row of metrics")
    if step is None:
        raise UserError(f"{path}: no step column, expected one of {', '.join(_STEP_COLUMNS)}")
    # Rows without a step are W&B's own, such as the machine's load.
    kept: list[Mapping[str, Any]] = [{**row, step: _step(row[step], step, path)} for row in rows if step in row]
    found = {name: values for name, values in columns(kept, step).items() if not name.startswith("_")}
    return found, repeated(kept, step)


def _step(value: Any, name: str, path: Path) -> int:
    if not isinstance(value, int | float) or not 0 <= value <= MAX_STEP or value != int(value):
        raise UserError(f"{path}: {name} {str(value)[:40]} is not a whole number from 0 to {MAX_STEP}")
    return int(value)


def _chart_columns(path: Path, header: Sequence[str]) -> dict[str, str]:
    """Metric of each column of a chart's export; its `__MIN` and `__MAX` columns repeat the value."""
    pairs = {c: c.rpartition(" - ") for c in header[1:] if not c.endswith(("__MIN", "__MAX"))}
    runs = dict.fromkeys(run for run, _, _ in pairs.values() if run)
    if len(runs) > 1:
        raise UserError(f"{path}: holds the runs {', '.join(runs)}; export one run at a time")
    return {"Step": "Step"} | {column: metric for column, (_, _, metric) in pairs.items()}


def _csv_row(path: Path, line: int, row: Sequence[str], names: Sequence[str | None]) -> dict[str, Any]:
    if len(row) != len(names):
        raise UserError(f"{path}:{line}: expected {len(names)} cells, as in the first line")
    return {name: _number(text) for name, text in zip(names, row, strict=True) if name is not None and text != ""}


def _number(value: Any) -> Any:
    """Text that is a number as one, W&B's spellings of NaN and infinity included; all else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def _metadata(folder: Path) -> dict[str, Any] | None:
    """Environment from W&B's wandb-metadata.json, which lies in the run's folder or its `files`."""
    for path in (folder / "wandb-metadata.json", folder / "files/wandb-metadata.json"):
        try:
            read = as_map(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            continue
        found = {
            "versions.python": read.get("python"),
            "host.name": read.get("host"),
            "host.system": read.get("os"),
            "host.cores": read.get("cpu_count_logical"),
            "devices.gpus": f"{read['gpu_count']} x {read.get('gpu')}" if read.get("gpu_count") else None,
            "code.commit": as_map(read.get("git")).get("commit"),
        }
        return {key: value for key, value in found.items() if value is not None}
    return None
