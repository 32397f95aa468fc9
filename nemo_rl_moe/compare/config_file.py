"""The configuration that lies beside an exported history: YAML or JSON, plain or as W&B writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.yaml_file import read_yaml

CONFIG_NAMES = ("config.yaml", "config.yml", "config.json")
MANIFEST_NAMES = ("manifest.json", "wandb-metadata.json", "wandb-summary.json")


def beside(history: Path, *, own_folder: bool) -> dict[str, Any] | None:
    """The configuration of an exported history, None when there is none.

    Args:
        history: `runs/base.csv` has `runs/base.config.yaml` (or `.json`).
        own_folder: the folder holds this history only, so that its `config.yaml` can be no other run's.
    """
    names = [f"{history.stem}.{name}" for name in CONFIG_NAMES] + (list(CONFIG_NAMES) if own_folder else [])
    for name in names:
        path = history.with_name(name)
        if path.is_file():
            return read_config(path)
    return None


def read_config(path: Path) -> dict[str, Any]:
    """Reads a configuration as nested maps.

    Raises:
        UserError: the file is broken; names it.
    """
    if path.suffix != ".json":
        return unwrapped(read_yaml(path, str(path)).plain())
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error})") from error
    if not isinstance(read, dict):
        raise UserError(f"{path}: expected an object, the run's configuration")
    return unwrapped(read)


def unwrapped(config: Mapping[str, Any]) -> dict[str, Any]:
    """W&B's own files put each top-level value into a map of `value` (and `desc`), and add keys of W&B's."""
    plain = {key: item for key, item in config.items() if key not in ("_wandb", "wandb_version")}
    wrapped = [
        isinstance(item, Mapping) and "value" in item and set(item) <= {"value", "desc"} for item in plain.values()
    ]
    return {key: item["value"] for key, item in plain.items()} if plain and all(wrapped) else plain
