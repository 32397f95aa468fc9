"""Trackers outside the run directory: Weights & Biases and TensorBoard, with the step explicit in both."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from nemo_rl_moe.recipe.schema import LoggerConfig
from nemo_rl_moe.tracking.run_dir import RunDirectory


class Backend(Protocol):
    """Somewhere metrics go besides metrics.jsonl."""

    name: str

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs one row of metrics; steps may come in any order."""

    def finish(self, exit_code: int) -> None:
        """Sends or writes what is left."""


class WandbBackend:
    """Weights & Biases.

    The step is a metric of its own, and all others are plotted over it: W&B's built-in step drops every row that is
    older than the newest, such as a validation that ends after the next training step.

    Args:
        directory: the run; W&B's files go to `<run directory>/wandb`.
        config: what W&B shows as the run's configuration, without secrets.
        settings: the recipe's `logger`.
        warn: called with a message when W&B cannot go online and writes offline files instead.

    Raises:
        Exception: whatever W&B raises when it cannot start even offline.
    """

    name = "W&B"

    def __init__(
        self, directory: RunDirectory, config: Mapping[str, Any], settings: LoggerConfig, warn: Callable[[str], None]
    ) -> None:
        import wandb

        known = directory.manifest.get("wandb_run_id")
        run_id = known or uuid.uuid4().hex[:12]
        mode = settings.wandb.mode
        # Without a key W&B would ask for one on the terminal, and the run would wait for an answer that nobody gives.
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            warn("W&B: no API key (WANDB_API_KEY or `wandb login`); writing offline files for a later `wandb sync`")
            mode = "offline"

        def start(mode: Literal["online", "offline"]) -> Any:
            return wandb.init(
                entity=settings.wandb.entity,
                project=settings.wandb.project,
                name=settings.wandb.name or directory.path.name,
                id=run_id,
                resume="allow" if known else None,
                dir=str(directory.path),
                config=dict(config),
                mode=mode,
                settings=wandb.Settings(
                    init_timeout=settings.wandb.init_timeout_s,
                    finish_timeout=settings.wandb.finish_timeout_s,
                    console="off",
                    silent=True,
                    # Host and command line are in our manifest, where secrets have been removed from them.
                    x_disable_meta=True,
                    x_save_requirements=False,
                    disable_git=True,
                    save_code=False,
                ),
            )

        try:
            self._run = start(mode)
        except Exception as error:
            if mode == "offline":
                raise
            warn(f"W&B: {_one_line(error)}; writing offline files for a later `wandb sync`")
            self._run = start("offline")
        directory.update_manifest(wandb_run_id=run_id)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs one row."""
        self._run.log({"step": step, **metrics})

    def finish(self, exit_code: int) -> None:
        """Uploads what is left, or gives up after a limit; the files stay for `wandb sync`."""
        self._run.finish(exit_code=exit_code)


class TensorBoardBackend:
    """TensorBoard scalars under `<run directory>/tensorboard`."""

    name = "TensorBoard"

    def __init__(self, directory: RunDirectory) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory.path / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one scalar for each metric and flushes, so that a killed run keeps its steps."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, exit_code: int) -> None:
        """Closes the event file."""
        self._writer.close()


class BestEffort:
    """Runs a backend so that its failures are a warning once and never the end of the run.

    Args:
        name: for the warning.
        start: makes the backend; may raise.
        warn: called with the first failure's message.
    """

    def __init__(self, name: str, start: Callable[[], Backend], warn: Callable[[str], None]) -> None:
        self._name = name
        self._warn: Callable[[str], None] | None = warn
        self._backend: Backend | None = None
        self._guard("start", lambda: setattr(self, "_backend", start()))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Passes the row on; NaN and infinity too, which both back-ends show as gaps."""
        backend = self._backend
        if backend is not None:
            self._guard("log", lambda: backend.log(step, {k: _plain(v) for k, v in metrics.items()}))

    def finish(self, exit_code: int) -> None:
        """Ends the backend."""
        backend, self._backend = self._backend, None
        if backend is not None:
            self._guard("finish", lambda: backend.finish(exit_code))

    def _guard(self, doing: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            if self._warn is not None:
                self._warn(f"{self._name} failed to {doing} ({_one_line(error)}); metrics.jsonl has everything")
                self._warn = None


def _plain(value: float) -> float:
    number = float(value)
    return number if math.isfinite(number) else math.nan


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
