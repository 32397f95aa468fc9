"""Finds out what a path holds, and reads it."""

from __future__ import annotations

import codecs
import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rl_moe.compare import read_tensorboard, read_wandb
from nemo_rl_moe.compare.config_file import CONFIG_NAMES, MANIFEST_NAMES
from nemo_rl_moe.compare.json_lines import parse, read_lines
from nemo_rl_moe.compare.read_run_dir import read_run_dir
from nemo_rl_moe.compare.run_data import RunData
from nemo_rl_moe.errors import UserError

_EXPECTED = (
    "expected a run directory (metrics.jsonl), a W&B history (.csv, .json, .jsonl), a W&B offline run (.wandb) or "
    "NeMo-RL's TensorBoard dump (.json)"
)


def read_runs(paths: Sequence[Path]) -> list[RunData]:
    """Reads runs and gives them names that tell them apart.

    Raises:
        UserError: every path that cannot be read, one line each.
    """
    runs, problems = [], []
    for path, name in zip(paths, distinct_names(paths), strict=True):
        try:
            runs.append(read_run(path, name))
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    return runs


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as it takes to tell them apart (all paths by the same number of parts)."""
    parts = [_real(path).parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(own[-count:]) for own in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return ["/".join(own) for own in parts]


def read_run(path: Path, name: str | None = None) -> RunData:
    """Reads one run.

    Raises:
        UserError: the path holds none of the known kinds, or a broken one.
    """
    name = name or _real(path).name
    try:
        if path.is_dir():
            return _read_folder(path, name)
        if path.is_file():
            return _read_file(path, name, own_folder=False)
        if os.path.lexists(path):
            raise UserError(f"{path}: neither a file nor a folder, {_EXPECTED}")
    except OSError as error:
        # Also a run that is deleted while it is read.
        raise UserError(f"{error.filename or path}: cannot read ({error.strerror})") from error
    raise UserError(f"{path}: no such file or folder, {_EXPECTED}")


def _real(path: Path) -> Path:
    """The path without links; unlike `Path.resolve` it knows what to say of a link to itself: the path as it is."""
    return Path(os.path.realpath(path))


def is_source(path: Path) -> bool:
    """Whether a path looks like a run that `read_run` reads, without reading it."""
    if path.is_file():
        return path.suffix == ".wandb" or _is_history(path)
    return path.is_dir() and (
        (path / "metrics.jsonl").is_file()
        or (path / "manifest.json").is_file()
        or any(log.parent == path for log in wandb_logs(path))
        or (len(_histories(path)) == 1 and not any(entry.is_dir() for entry in path.iterdir()))
    )


def wandb_logs(folder: Path) -> list[Path]:
    """W&B's logs in a run's `wandb` folder, in the folder of one attempt, or in the folder that holds `wandb`."""
    # Unlike a path's own `glob` this one does not mind a folder that is deleted meanwhile.
    root = glob.escape(str(folder))
    return sorted(Path(log) for depth in ("", "*/", "*/*/") for log in glob.glob(f"{root}/{depth}*.wandb"))


def _histories(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.iterdir()) if file.is_file() and _is_history(file)]


def _is_history(file: Path) -> bool:
    others = (*CONFIG_NAMES, *MANIFEST_NAMES)
    return file.suffix in (".csv", ".json", ".jsonl") and not file.name.endswith(others)


def _read_folder(path: Path, name: str) -> RunData:
    if (path / "metrics.jsonl").is_file() or (path / "manifest.json").is_file():
        return read_run_dir(path, name)
    logs = wandb_logs(path)
    if logs:
        ids = {log.name for log in logs}
        if len(ids) > 1:
            raise UserError(f"{path}: holds {len(ids)} W&B runs ({', '.join(sorted(ids)[:3])} …); name one of them")
        return read_wandb.read_offline(logs, name)
    files = _histories(path)
    if len(files) == 1:
        return _read_file(files[0], name, own_folder=True)
    found = f"{len(files)} files that may be histories, name one of them" if files else f"nothing known; {_EXPECTED}"
    raise UserError(f"{path}: holds {found}")


def _read_file(path: Path, name: str, *, own_folder: bool) -> RunData:
    if path.suffix == ".wandb":
        return read_wandb.read_offline([path], name)
    if path.suffix == ".csv":
        return read_wandb.read_csv(path, name, own_folder=own_folder)
    if path.suffix not in (".json", ".jsonl"):
        raise UserError(f"{path}: {_EXPECTED}")
    if path.suffix == ".jsonl":
        rows, flaws = read_lines(path)
        return read_wandb.read_rows(path, name, rows, own_folder=own_folder, flaws=flaws)
    read = _json(path)
    if isinstance(read, list):
        return read_wandb.read_rows(path, name, read, own_folder=own_folder)
    if read_tensorboard.is_dump(read) and read_wandb.step_column(read) is None:
        return read_tensorboard.read_dump(path, name, read, own_folder=own_folder)
    if isinstance(read, dict) and read and all(isinstance(column, dict) for column in read.values()):
        return read_wandb.read_rows(path, name, read_wandb.table_rows(read), own_folder=own_folder)
    raise UserError(f"{path}: JSON of no known form, {_EXPECTED}")


def _json(path: Path) -> Any:
    try:
        return parse(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error})") from error
