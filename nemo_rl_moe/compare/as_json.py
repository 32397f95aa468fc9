"""Comparisons as JSON data."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from nemo_rl_moe.compare.accuracy import Accuracy
from nemo_rl_moe.compare.comparison import Line, Pair
from nemo_rl_moe.compare.health import Health
from nemo_rl_moe.compare.matching import ABSENT, Difference
from nemo_rl_moe.compare.statistics import LEVEL


def text(data: Any) -> str:
    """One JSON document. A setting may be infinite or no JSON at all, such as a date: those are texts."""
    return json.dumps(_plain(data), indent=1, allow_nan=False, default=str)


def _plain(data: Any) -> Any:
    if isinstance(data, dict):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data


def document(pairs: Sequence[Pair]) -> dict[str, Any]:
    """All pairs. Numbers that do not exist are null; a key's side that lacks it is left out."""
    return {"confidence": LEVEL, "pairs": [pair_dict(pair) for pair in pairs]}


def pair_dict(pair: Pair) -> dict[str, Any]:
    """One pair."""
    found = pair.differences
    return {
        "steps": [pair.window.first, pair.window.last],
        "observations": 0 if pair.blocked else len(pair.window),
        "blocked": pair.blocked,
        "baseline": run_dict(pair.base),
        "run": run_dict(pair.run),
        "verdict": found.verdict,
        "why": found.why,
        "treatment": found.treatment,
        "metrics": [_line(line) for line in pair.lines],
        "accuracy": [_accuracy(each) for each in pair.accuracies],
        "warnings": pair.warnings,
        "config_differences": _differences(found.config),
        "environment_differences": _differences(found.environment),
    }


def run_dict(health: Health) -> dict[str, Any]:
    """A run, how it ended and what is wrong with it."""
    run, steps = health.run, health.run.training_steps
    return {
        "name": run.name,
        "path": str(run.path),
        "source": run.source,
        "steps": [int(steps[0]), int(steps[-1])] if len(steps) else None,
        "state": run.ending.state,
        "cause": run.ending.cause,
        "reason": run.ending.reason,
        "planned_steps": run.ending.planned_steps,
        "missing_steps": health.missing.tolist(),
        "nonfinite": {name: found.tolist() for name, found in health.nonfinite.items()},
        "problems": health.problems,
        "notes": list(run.notes),
    }


def _line(line: Line) -> dict[str, Any]:
    return {
        "key": line.row.key,
        "metric": line.row.metric,
        "unit": line.row.unit,
        "kind": line.kind,
        "baseline": line.base,
        "run": line.run,
        "change": line.change,
        "change_unit": line.row.change,
        "interval": line.interval and list(line.interval),
        "shown": line.shown,
        "note": line.note,
    }


def _accuracy(found: Accuracy) -> dict[str, Any]:
    return {
        "metric": found.metric,
        "step": found.step,
        "baseline": found.base,
        "run": found.run,
        "change": found.change,
        "samples": list(found.samples),
        "intervals": [interval and list(interval) for interval in found.intervals],
        "interval": found.interval and list(found.interval),
        "note": found.note,
    }


def _differences(found: Sequence[Difference] | None) -> list[dict[str, Any]] | None:
    if found is None:
        return None
    return [
        {"key": d.key, "kind": d.kind, "family": d.family}
        | {side: value for side, value in (("baseline", d.before), ("run", d.after)) if value is not ABSENT}
        for d in found
    ]
