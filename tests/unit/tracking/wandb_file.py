"""Reads back what the real W&B library wrote offline."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from nemo_rl_moe.compare.wandb_file import items, records


def finished_records(path: Path, wait_s: float = 30.0) -> list[Any]:
    """Records once the last one is there: W&B's own process still writes for a moment after `finish()` has returned."""
    until = time.monotonic() + wait_s
    while time.monotonic() < until:
        found = list(records(path))
        if any(record.WhichOneof("record_type") == "exit" for record in found):
            return found
        time.sleep(0.05)
    raise AssertionError(f"{path} has no exit record after {wait_s:g} s")


def history(path: Path) -> list[dict[str, Any]]:
    """Every logged row, without W&B's own fields."""
    rows = [items(r.history.item) for r in finished_records(path) if r.WhichOneof("record_type") == "history"]
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]


def config(path: Path) -> dict[str, Any]:
    """The run's configuration."""
    for record in finished_records(path):
        if record.WhichOneof("record_type") == "run":
            return items(record.run.config.update)
    raise AssertionError(f"no run record in {path}")
