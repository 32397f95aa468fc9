"""Reads a run directory of ours, finished or still being written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_rl_moe.compare.ending import ending_of
from nemo_rl_moe.compare.json_lines import read_lines, repeated, step_flaw
from nemo_rl_moe.compare.names import ours
from nemo_rl_moe.compare.run_data import MAX_STEP, Ending, RunData, as_map, columns
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.yaml_file import read_yaml


def read_run_dir(path: Path, name: str) -> RunData:
    """Reads `metrics.jsonl`, `config.yaml` and `manifest.json`, those of them that are there.

    Lines of metrics that are broken are left out and named; a run that logged nothing has no series.

    Raises:
        UserError: configuration or manifest is broken; names file and line.
    """
    log = path / "metrics.jsonl"
    rows, flaws = read_lines(log, step_flaw) if log.is_file() else ([], [])
    found = ours(columns(rows, "step"))
    file = path / "config.yaml"
    # An empty file is what a full disk leaves, and no configuration.
    config = (read_yaml(file, str(file)).plain() or None) if file.is_file() else None
    manifest = _manifest(path / "manifest.json")
    planned = planned_steps(config)
    ending = Ending(planned_steps=planned) if manifest is None else ending_of(manifest, planned, path)
    samples = path / "rollouts"
    return RunData(
        name,
        path,
        "run directory",
        found,
        config,
        None if manifest is None else environment_of(manifest),
        ending,
        samples if samples.is_dir() else None,
        flaws,
        repeated(rows, "step"),
    )


def planned_steps(config: Mapping[str, Any] | None) -> int | None:
    """`grpo.max_num_steps` of a configuration, ours or NeMo-RL's; None when it has none."""
    steps = as_map(as_map(config).get("grpo")).get("max_num_steps")
    return steps if isinstance(steps, int) and not isinstance(steps, bool) and 0 < steps <= MAX_STEP else None


def environment_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What a run ran on, by dotted name: `versions.*`, `host.*`, `devices.*`, `code.*`."""
    versions, host, devices, git = (as_map(manifest.get(key)) for key in ("versions", "host", "devices", "git"))
    listed = devices.get("gpus_of_this_host")
    gpus = [str(as_map(gpu).get("name", "?")) for gpu in (listed if isinstance(listed, list) else [])]
    found: dict[str, Any] = {f"versions.{name}": version for name, version in versions.items() if version is not None}
    found |= {f"host.{name}": value for name, value in host.items()}
    found["devices.kind"] = devices.get("kind")
    if gpus:
        found["devices.gpus"] = ", ".join(f"{gpus.count(gpu)} x {gpu}" for gpu in dict.fromkeys(gpus))
    if git:
        found["code.commit"] = git.get("commit")
        found["code.changed"] = bool(git.get("changed"))
    return found


def _manifest(path: Path) -> dict[str, Any] | None:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error})") from error
    if not isinstance(read, dict):
        raise UserError(f"{path}: expected an object, the manifest of a run")
    return read
