"""A model by name, folder, file or recipe: its config and its count."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from nemo_rl_moe.bench.flops.count import ModelFlops, UnknownFamily, model_flops
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.published_models import PUBLISHED, model_config
from nemo_rl_moe.recipe.schema import PolicyConfig


def find_model(name: str) -> tuple[str, dict[str, Any]]:
    """A model's name and config.json.

    Args:
        name: a published model, with or without its organisation, in any case; or a model folder; or a config.json.

    Raises:
        UserError: none of them; the message has the nearest published names.
    """
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        return name, _read(file)
    known = {key.lower(): key for key in PUBLISHED} | {key.rpartition("/")[2].lower(): key for key in PUBLISHED}
    if (key := known.get(name.lower())) is not None:
        return key, PUBLISHED[key]
    shorts = [key.rpartition("/")[2].lower() for key in PUBLISHED]
    began = [key for key in known if key.startswith(name.lower())]
    near = began or difflib.get_close_matches(name.lower(), shorts, 2, 0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"published ones: {', '.join(shorts)}"
    raise UserError(f"--model {name}: no folder with a config.json, no file, and no published model; {hint}")


def _read(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: no config.json that can be read: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{file}: expected a JSON object, found {type(values).__name__}")
    return values


def count_model(name: str, mtp_layers: int = 0) -> tuple[str, dict[str, Any], ModelFlops]:
    """A model's name, config and count.

    Raises:
        UserError: no such model, or one of a family that is not counted.
    """
    found, config = find_model(name)
    try:
        return found, config, model_flops(config, mtp_layers)
    except UnknownFamily as reason:
        raise UserError(f"--model {name}: {reason}") from None


def recipe_flops(policy: PolicyConfig, folder: Path | None = None) -> ModelFlops | None:
    """Count of a recipe's model with what it trains of multi-token prediction; None where it cannot be counted.

    Args:
        folder: where the model is, when the recipe's name for it is a hub id.
    """
    config = model_config(policy if folder is None else policy.model_copy(update={"model_name": str(folder)}))
    try:
        return None if config is None else model_flops(config, policy.megatron_cfg.mtp_num_layers)
    except UnknownFamily:
        return None
