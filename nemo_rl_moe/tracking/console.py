"""What a user sees of a run: on a terminal a table with a live last line, elsewhere plain lines that grep well."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

# The split of a step: label, colour, metrics whose seconds it adds up. What is left of the total is `other`.
SPLIT = (
    ("generation", "cyan", ("exposed_generation",)),
    ("logprob", "yellow", ("policy_and_reference_logprobs",)),
    ("train", "magenta", ("policy_training",)),
    ("refit", "green", ("weight_sync",)),
)
_OTHER = ("other", "bright_black")
_BAR_CELLS = 24
_REPEAT_TITLES = 40
_SUMMARY_STEPS = 10
# Title, width, metric and decimals of each number; None shows significant digits, for what may be of any size.
_COLUMNS = (
    ("reward", 8, "train/reward", 3),
    ("loss", 9, "train/loss", None),
    ("grad norm", 9, "train/grad_norm", None),
    ("gen KL err", 10, "train/gen_kl_error", None),
)


def step_split(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds of a step by label, `other` last; they add up to the step's total."""
    total = metrics.get("timing/train/total_step_time", 0.0)
    parts = {label: sum(metrics.get(f"timing/train/{name}", 0.0) for name in names) for label, _, names in SPLIT}
    return {**parts, _OTHER[0]: max(0.0, total - sum(parts.values()))}


class RunConsole:
    """The console of a run.

    Args:
        total_steps: last step of the run.
        stream: where to write; None is standard output.
        width: of the terminal in cells; None asks it.
    """

    def __init__(self, total_steps: int, stream: IO[str] | None = None, width: int | None = None) -> None:
        self._rich = Console(file=stream or sys.stdout, width=width, highlight=False)
        self._terminal = self._rich.is_terminal
        self._total = total_steps
        self._rows = 0
        self._last_step = 0
        self._rewards: dict[int, float] = {}
        self._began = time.monotonic()
        self._status = _Status(total_steps)
        # 4 refreshes a second: enough for a clock, and far below 1 % of a core.
        self._live = Live(self._status, console=self._rich, refresh_per_second=4, transient=True)

    def header(self, lines: Sequence[tuple[str, str]]) -> None:
        """Prints what runs, and starts the live line on a terminal."""
        indent = max(len(label) for label, _ in lines) + 2
        for label, text in [*lines, ("", "")]:
            self._show(Text(f"{label:<{indent}}", style="bold") + Text(text))
        if self._terminal:
            self._live.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints a training step, and a validation on a line of its own."""
        if "train/reward" in metrics:
            self._rewards[step] = metrics["train/reward"]
            self._last_step = max(self._last_step, step)
            self._status.step = self._last_step
            self._status.seconds.append(metrics.get("timing/train/total_step_time", 0.0))
            if self._terminal:
                self._row(step, metrics)
            else:
                self._show(Text(f"step {step}/{self._total}  {plain_numbers(metrics)}"))
        if "validation/accuracy" in metrics:
            samples = metrics.get("validation/num_samples", math.nan)
            accuracy = metrics["validation/accuracy"]
            line = f"validation at step {step}: accuracy {accuracy:.3f} ({samples:g} samples)"
            self._show(Text(line, style="bold blue"))

    def event(self, message: str) -> None:
        """Prints a message; one that begins with `warning: ` stands out."""
        self._show(Text(message, style="yellow" if message.startswith("warning: ") else ""))

    def phase(self, name: str | None) -> None:
        """Sets what the live line says the run is doing."""
        self._status.phase = name

    def finish(self, exit_code: int, run_dir: str) -> None:
        """Ends the live line and prints how the run went."""
        self._live.stop()
        if not self._rewards:
            return
        minutes, seconds = divmod(round(time.monotonic() - self._began), 60)
        took = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
        verb = "done" if exit_code == 0 else f"ended with exit code {exit_code}"
        summary = f"{verb}: step {self._last_step} of {self._total} after {took}; {self._reward_summary()}"
        self._show(Text(summary, style="bold"))
        self._show(Text(f"metrics: {run_dir}/metrics.jsonl"))

    def _reward_summary(self) -> str:
        values = [self._rewards[step] for step in sorted(self._rewards)]
        count = min(_SUMMARY_STEPS, len(values) // 2)
        if count == 0:
            return f"reward {values[0]:.3f}"
        first, last = sum(values[:count]) / count, sum(values[-count:]) / count
        return f"mean reward {first:.3f} in the first {count} step{'s'[: count > 1]}, {last:.3f} in the last {count}"

    def _row(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._rows % _REPEAT_TITLES == 0:
            self._show(self._titles(), crop=True)
        self._rows += 1
        line = Text(f"{step:>{len(str(self._total)) + 2}}")
        for _, width, name, decimals in _COLUMNS:
            line.append(f"{number(metrics.get(name), decimals):>{width + 2}}")
        line.append(f"{_tokens_per_second(metrics):>10}")
        line.append(f"{metrics.get('timing/train/total_step_time', math.nan):>8.2f} s  ")
        cells = max(0, min(_BAR_CELLS, self._rich.width - line.cell_len))
        self._show(line + _bar(step_split(metrics), cells), crop=True)

    def _titles(self) -> Text:
        line = Text(f"{'step':>{len(str(self._total)) + 2}}", style="bold")
        for title, width, _, _ in _COLUMNS:
            line.append(f"{title:>{width + 2}}")
        line.append(f"{'tokens/s':>10}{'time':>10}  ")
        for label, colour in [("gen", SPLIT[0][1]), *((label, colour) for label, colour, _ in SPLIT[1:]), _OTHER]:
            line.append(f"{label} ", style=f"not bold {colour}")
        return line

    def _show(self, text: Text, *, crop: bool = False) -> None:
        # A reader that has gone (`| head`, a closed terminal) or a full disk under the redirected output must not end a
        # run that may have days behind it.
        with contextlib.suppress(OSError):
            if self._terminal:
                self._rich.print(text, no_wrap=crop, overflow="crop" if crop else None)
            else:
                # Not through rich, which would wrap the line at 80 columns.
                self._rich.file.write(text.plain.rstrip() + "\n")
                self._rich.file.flush()


def number(value: float | None, decimals: int | None = None) -> str:
    """The decimals asked for, else up to four significant digits, with an exponent only for the very small or large."""
    if value is None:
        return "-"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if decimals is not None:
        return f"{value:.{decimals}f}"
    return f"{value:.1e}" if not 1e-3 <= abs(value) < 1e5 else f"{value:.4g}"


def plain_numbers(metrics: Mapping[str, float]) -> str:
    """The step's numbers as one plain line, `name value` apart by two spaces."""
    names = {"grad norm": "grad_norm", "gen KL err": "gen_kl_error"}
    parts = [f"{names.get(title, title)} {number(metrics.get(name), places)}" for title, _, name, places in _COLUMNS]
    seconds = metrics.get("timing/train/total_step_time", math.nan)
    split = ", ".join(f"{label} {value:.2f}" for label, value in step_split(metrics).items())
    parts += [f"tokens/s {_tokens_per_second(metrics).replace(',', '')}", f"time {seconds:.2f} s ({split})"]
    return "  ".join(parts)


def _tokens_per_second(metrics: Mapping[str, float]) -> str:
    seconds = metrics.get("timing/train/total_step_time", 0.0)
    tokens = metrics.get("performance/total_num_tokens", 0.0)
    return f"{tokens / seconds:,.0f}" if seconds > 0 else "-"


def _bar(split: Mapping[str, float], cells: int) -> Text:
    """The step's split as a bar of coloured cells; cut points are rounded, so that the cells always add up."""
    total = sum(split.values())
    colours = {label: colour for label, colour, _ in SPLIT} | {_OTHER[0]: _OTHER[1]}
    bar, done, before = Text(), 0.0, 0
    for label, seconds in split.items():
        done += seconds
        after = round(cells * done / total) if total > 0 else 0
        bar.append("█" * (after - before), style=colours[label])
        before = after
    return bar


class _Status:
    """The live line: progress, current phase, time left."""

    def __init__(self, total: int) -> None:
        self.step = 0
        self.phase: str | None = None
        self.seconds: list[float] = []
        self._total = total
        self._began = time.monotonic()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        grid = Table.grid(padding=(0, 1))
        doing = (self.phase or ("starting" if not self.seconds else "")).replace("_", " ")
        elapsed = clock(time.monotonic() - self._began)
        grid.add_row(
            f"step {self.step}/{self._total}",
            ProgressBar(total=self._total, completed=self.step, width=24),
            f"{elapsed} elapsed{self._left()}",
            Text(doing, style="cyan"),
        )
        yield grid

    def _left(self) -> str:
        recent = self.seconds[-20:]
        if not recent:
            return ""
        return f", about {clock(sum(recent) / len(recent) * (self._total - self.step))} left"


def clock(seconds: float) -> str:
    """`3:20`, or `1:03:20` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
