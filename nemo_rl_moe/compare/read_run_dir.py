"""Reads a run directory of ours, finished or still being written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_rl_moe.compare.ending import ending_of
from nemo_rl_moe.compare.names import ours
from nemo_rl_moe.compare.run_data import Ending, RunData, columns
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.yaml_file import read_yaml
from nemo_rl_moe.tracking.metrics_log import read_rows


def read_run_dir(path: Path, name: str) -> RunData:
    """Reads `metrics.jsonl`, and `config.yaml` and `manifest.json` where they are.

    Raises:
        UserError: a file is broken, or no step was logged; names file and line.
    """
    found = ours(columns(read_rows(path / "metrics.jsonl"), "step"))
    config = (
        read_yaml(path / "config.yaml", str(path / "config.yaml")).plain() if (path / "config.yaml").is_file() else None
    )
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
    )


def planned_steps(config: Mapping[str, Any] | None) -> int | None:
    """`grpo.max_num_steps` of a configuration, ours or NeMo-RL's; None when it has none."""
    steps = ((config or {}).get("grpo") or {}).get("max_num_steps")
    return steps if isinstance(steps, int) else None


def environment_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What a run ran on, by dotted name: `versions.*`, `host.*`, `devices.*`, `code.*`."""
    versions, host = manifest.get("versions") or {}, manifest.get("host") or {}
    devices, git = manifest.get("devices") or {}, manifest.get("git") or {}
    gpus = [gpu.get("name", "?") for gpu in devices.get("gpus_of_this_host") or []]
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
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from error
    if not isinstance(read, dict):
        raise UserError(f"{path}: expected an object, the manifest of a run")
    return read
