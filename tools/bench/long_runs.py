"""Two long run directories, and the command that compares them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from nemo_rl_moe.compare.names import ROWS

STEPS, METRICS, LIMIT_S = 10_000, 60, 2.0


def write(folder: Path, seed: int) -> Path:
    """A run of 10,000 steps and 60 metrics, those of every row of a comparison among them."""
    names = list(dict.fromkeys(row.metric for row in ROWS))
    names += [f"train/other_{i}" for i in range(METRICS - len(names))]
    values = np.random.default_rng(seed).uniform(1, 100, (STEPS, METRICS)).tolist()
    folder.mkdir()
    lines = (json.dumps({"step": i, **dict(zip(names, row, strict=True))}) + "\n" for i, row in enumerate(values, 1))
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def command(root: Path, *options: str) -> list[str]:
    """The command line that compares two such runs, which are made in `root`."""
    runs = [write(root / name, seed) for seed, name in enumerate("ab")]
    return [sys.executable, "-m", "nemo_rl_moe", "compare", *map(str, runs), *options]


def seconds(line: list[str], rounds: int) -> list[float]:
    """Wall seconds of each of several calls, process start included."""
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        subprocess.run(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        found.append(time.perf_counter() - began)
    return found
