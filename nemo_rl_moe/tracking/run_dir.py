"""The run directory: made, reopened for a resume, or refused; its manifest and its text files.

config.yaml             the resolved recipe
manifest.json           versions, host, devices, placement, recipe files and hashes, start, end and exit
metrics.jsonl           every metric of every step
rollouts/step_<n>.jsonl a few samples of each step
checkpoints/step_<n>/   complete checkpoints
run.log                 events with their times
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import yaml

from nemo_rl_moe.disk import writing
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.load import LoadedRecipe
from nemo_rl_moe.recipe.plan import plan
from nemo_rl_moe.tracking import manifest, resume_rules
from nemo_rl_moe.tracking.metrics_log import row
from nemo_rl_moe.tracking.secrets import Redactor

_BEFORE_MANIFEST = {"run.log", "config.yaml", ".config.yaml.partial", ".manifest.json.partial"}


class RunDirectory:
    """An open run directory, held by one process at a time. Made by `open`.

    Attributes:
        path: the directory.
        resumed: whether an earlier run in it goes on.
        notes: what the user should know of how it was opened.
        redactor: removes secrets from whatever is to be written.
    """

    def __init__(self, path: Path, log: IO[str], redactor: Redactor) -> None:
        self.path = path
        self.resumed = False
        self.notes: list[str] = []
        self.redactor = redactor
        self._log = log
        self._manifest: dict[str, Any] = {}

    @classmethod
    def open(cls, loaded: LoadedRecipe, *, resume: bool) -> RunDirectory:
        """Opens the recipe's run directory.

        Without `resume`, an earlier run of a recipe of the same name is set aside: its directory is renamed to
        `<name>.1` (or the next free number) and a new one is made. With `resume` its metrics are appended to; where
        there is none, a new run begins.

        Raises:
            UserError: the directory is held by a running process, holds something that is not a run, holds a run of
                another recipe (without `resume`), or its data or model differ from the recipe's (with `resume`).
        """
        path = loaded.run_dir
        notes = []
        earlier = _earlier_run(path)
        if earlier is not None and not resume:
            notes.append(f"set aside the earlier run as {_set_aside(path, earlier, loaded.name)}")
            earlier = None
        with _user_error_on_os_error(path):
            path.mkdir(parents=True, exist_ok=True)
            log = (path / "run.log").open("a", encoding="utf-8")
        _hold(log, path)
        try:
            directory = cls(path, log, Redactor(os.environ, loaded.resolved))
            directory.notes = notes
            with _user_error_on_os_error(path):
                directory._begin(loaded, earlier)
        except BaseException:
            if earlier is None:
                _remove_beginning(path)
            log.close()
            raise
        return directory

    @property
    def metrics_path(self) -> Path:
        """metrics.jsonl."""
        return self.path / "metrics.jsonl"

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The manifest as it was last written."""
        return self._manifest

    def log(self, message: str) -> None:
        """Appends a line with the time to run.log, without secrets.

        A full disk ends a run where its metrics are written. What is told after that must not hide why.
        """
        with contextlib.suppress(OSError):
            self._log.write(f"{manifest.now()} {self.redactor.text(message)}\n")
            self._log.flush()

    def write_rollouts(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Writes a step's samples, one JSON object a line; nothing when there are none."""
        if not samples:
            return
        folder = self.path / "rollouts"
        partial = folder / f".step_{step}.partial"
        lines = [json.dumps(_json_ready(sample), ensure_ascii=False, default=str) + "\n" for sample in samples]
        with writing(folder / f"step_{step}.jsonl"):
            folder.mkdir(exist_ok=True)
            partial.write_text("".join(lines), encoding="utf-8")
            os.replace(partial, folder / f"step_{step}.jsonl")

    def update_manifest(self, **fields: Any) -> None:
        """Sets top-level fields of the manifest and writes it."""
        self._manifest |= self.redactor.tree(fields)
        manifest.write_json(self.path / "manifest.json", self._manifest)

    def finish(self, exit_code: int, reason: str) -> None:
        """Writes end, exit code and reason to the manifest, and to run.log."""
        self.log(f"ended with exit code {exit_code}: {reason}")
        end = {"end": manifest.now(), "exit_code": exit_code, "reason": self.redactor.text(reason)}
        sessions = [*self._manifest["sessions"][:-1], self._manifest["sessions"][-1] | end]
        with writing(self.path / "manifest.json"):
            self.update_manifest(**end, sessions=sessions)

    def close(self) -> None:
        """Gives the directory back."""
        with contextlib.suppress(OSError):  # of a line that a full disk did not take, and that was reported then
            self._log.close()

    def _begin(self, loaded: LoadedRecipe, earlier: dict[str, Any] | None) -> None:
        config = self.redactor.tree(loaded.resolved)
        changed: list[dict[str, Any]] = []
        if earlier is not None:
            self.resumed = True
            changed = resume_rules.changes(self.path / "config.yaml", config)
            resume_rules.refuse_other_data_or_model(self.path, changed)
            self.notes += [f"resumed with {c['key']}: {c['before']!r} -> {c['after']!r}" for c in changed]
        start = manifest.now()
        session = {
            "start": start,
            "end": None,
            "exit_code": None,
            "reason": None,
            "command": [self.redactor.argument(argument) for argument in sys.argv],
            "versions": manifest.versions(),
            "host": manifest.host(),
            "git": manifest.git_state(),
            "changed": changed,
        }
        _write_yaml(self.path / "config.yaml", config)
        gpus = manifest.gpus() if loaded.recipe.cluster.device == "cuda" else []
        sessions = [*earlier["sessions"], session] if earlier else [session]
        # The top level describes the newest session; `sessions` keeps each start of a resumed run.
        fields = (
            (earlier or {})
            | session
            | {
                "start": sessions[0]["start"],
                "recipe": loaded.name,
                "overrides": [self.redactor.argument(override) for override in loaded.overrides],
                "recipe_files": manifest.hashed_files(loaded.files),
                "devices": {"kind": loaded.recipe.cluster.device, "gpus_of_this_host": gpus},
                "placement": plan(loaded.recipe).as_dict(),
                "sessions": sessions,
            }
        )
        self.update_manifest(**fields)


def _earlier_run(path: Path) -> dict[str, Any] | None:
    """Manifest of the run in a directory; None when the directory is missing or empty.

    Raises:
        UserError: the directory has files but no readable manifest, so it is not a run of ours.
    """
    if not path.exists():
        return None
    if not path.is_dir():
        raise UserError(f"logger.log_dir: {path} is a file, expected a directory")
    try:
        read = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        # A process killed while it made the directory leaves an empty run.log and config.yaml at most.
        if {p.name for p in path.iterdir()} <= _BEFORE_MANIFEST:
            return None
        raise UserError(
            f"logger.log_dir: {path} is not empty and holds no run (no manifest.json); name another directory"
        ) from None
    except ValueError as error:
        raise UserError(f"{path / 'manifest.json'}: not JSON ({error})") from error
    if not isinstance(read, dict) or not isinstance(read.get("sessions"), list):
        raise UserError(f"{path / 'manifest.json'}: not the manifest of a run; name another logger.log_dir")
    return read


def _set_aside(path: Path, earlier: Mapping[str, Any], name: str) -> Path:
    """Renames an earlier run's directory. Returns its new path."""
    if earlier.get("recipe") != name:
        raise UserError(
            f"logger.log_dir: {path} holds a run of the recipe {earlier.get('recipe')!r}, this is {name!r}; "
            f"name another directory, or remove it"
        )
    with (path / "run.log").open("a", encoding="utf-8") as log:
        _hold(log, path)
        number = 1
        while (target := path.with_name(f"{path.name}.{number}")).exists():
            number += 1
        path.rename(target)
    return target


def _remove_beginning(path: Path) -> None:
    """Removes what `_begin` has written so far, and the directory when nothing else is in it."""
    with contextlib.suppress(OSError):
        for name in _BEFORE_MANIFEST | {"manifest.json"}:
            (path / name).unlink(missing_ok=True)
        path.rmdir()


def _hold(log: IO[str], path: Path) -> None:
    """Locks run.log; the kernel lets go of it whichever way the process ends.

    Raises:
        UserError: another process holds it.
    """
    # A file system without locks can only go unguarded.
    with contextlib.suppress(OSError):
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.close()
            raise UserError(f"logger.log_dir: {path} belongs to a run that is still going on") from None


@contextlib.contextmanager
def _user_error_on_os_error(path: Path):
    try:
        yield
    except OSError as error:
        raise UserError(f"logger.log_dir: cannot write to {path} ({error.strerror})") from error


def _json_ready(sample: Mapping[str, Any]) -> dict[str, Any]:
    """The sample with non-finite numbers as null, as in metrics.jsonl."""
    numbers = {k: v for k, v in sample.items() if isinstance(v, float)}
    finite = row(0, numbers)
    return {key: finite[key] if key in numbers else value for key, value in sample.items()}


def _write_yaml(path: Path, data: Any) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), encoding="utf-8")
    os.replace(partial, path)
