"""What may differ between a run and its resume.

The position in the data and the state of the optimizer belong to the data and the model they were made with. Resuming
with others would skip or repeat prompts, or train another model, without a word; so that is refused. Every other key
may change (a learning rate, the number of steps, a placement); the change is logged and kept in the manifest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from nemo_rl_moe.errors import UserError

_FIXED = (
    "policy.model_name",
    "policy.tokenizer",
    "policy.hf_config_overrides",
    "data.train",
    "data.default",
    "data.shuffle",
    "data.max_input_seq_length",
    "grpo.seed",
)


def changes(config_path: Path, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Differences between the config.yaml of a run and a new configuration.

    Returns:
        `{"key", "before", "after"}` of each changed leaf, in the schema's order. None where a key is on one side only.

    Raises:
        UserError: config.yaml cannot be read.
    """
    try:
        old = yaml.safe_load(config_path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{config_path}: cannot be read, so the run cannot be resumed ({error})") from error
    before, after = dict(_leaves(old or {})), dict(_leaves(config))
    keys = dict.fromkeys([*after, *before])
    differ = [key for key in keys if before.get(key) != after.get(key)]
    return [{"key": key, "before": before.get(key), "after": after.get(key)} for key in differ]


def refuse_other_data_or_model(path: Path, changed: list[dict[str, Any]]) -> None:
    """Raises a UserError naming every changed key that a resume must not change."""
    fixed = [c for c in changed if any(c["key"] == key or c["key"].startswith(f"{key}.") for key in _FIXED)]
    if fixed:
        lines = "".join(f"\n  {c['key']}: was {c['before']!r}, now {c['after']!r}" for c in fixed)
        raise UserError(
            f"{path}: this run cannot go on with other data or another model; "
            f"start a new one without --resume or restore:{lines}"
        )


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value
