"""One place that the loops report to; it tells metrics.jsonl, the console, W&B and TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO, Any

from nemo_rl_moe import interrupts
from nemo_rl_moe.disk import CannotWrite
from nemo_rl_moe.recipe.load import LoadedRecipe
from nemo_rl_moe.tracking.backends import BestEffort, TensorBoardBackend, WandbBackend
from nemo_rl_moe.tracking.console import RunConsole
from nemo_rl_moe.tracking.header import header_lines
from nemo_rl_moe.tracking.metrics_log import MetricsLog, by_step, read_rows
from nemo_rl_moe.tracking.run_dir import RunDirectory


class Tracker:
    """Records a run from its header to its exit code.

    metrics.jsonl is the record, so failing to write it is an error. A back-end that fails is one warning.
    `start_backends` comes apart from the rest: W&B's server may take its time, and a run can be stopped meanwhile.

    Args:
        directory: the open run directory; closed by `close`.
        loaded: the recipe.
        stream: where the console writes; None is standard output.
    """

    def __init__(self, directory: RunDirectory, loaded: LoadedRecipe, *, stream: IO[str] | None = None) -> None:
        self._directory = directory
        self._metrics = MetricsLog(directory.metrics_path)
        self._console = RunConsole(loaded.recipe.grpo.max_num_steps, stream)
        self._console.header(header_lines(loaded, directory.path))
        for note in directory.notes:
            self.event(note)
        for warning in loaded.warnings:
            # Already on the user's screen: the command line shows them before a run starts.
            directory.log(f"warning: {warning.path}: {warning.message}")
        self._loaded = loaded
        self._backends: list[BestEffort] = []
        self._closed = False

    def start_backends(self) -> None:
        """Starts W&B and TensorBoard if the recipe asks for them."""
        loaded, directory = self._loaded, self._directory
        settings = loaded.recipe.logger

        def warn(message: str) -> None:
            self.event(f"warning: {message}")

        if settings.wandb_enabled:
            config = directory.redactor.tree(loaded.resolved)
            self._backends.append(BestEffort("W&B", lambda: WandbBackend(directory, config, settings, warn), warn))
        if settings.tensorboard_enabled:
            self._backends.append(BestEffort("TensorBoard", lambda: TensorBoardBackend(directory), warn))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records metrics of a step everywhere.

        Args:
            step: the step they belong to, 0 before the first update; it need not be the newest.
            metrics: numbers by the names of `definitions`.
        """
        self._metrics.log(step, metrics)
        self._console.step(step, metrics)
        for backend in self._backends:
            backend.log(step, metrics)

    def restore(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records those metrics of a step that an earlier process, killed before it could, did not."""
        logged = self.logged(step)
        missing = {name: value for name, value in metrics.items() if name not in logged}
        if missing:
            self.log(step, missing)

    def logged(self, step: int) -> frozenset[str]:
        """Names of the step's metrics in metrics.jsonl, those of earlier processes included."""
        return frozenset(by_step(read_rows(self._metrics.path)).get(step, ()))

    def rollouts(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Writes a step's samples to rollouts/step_<n>.jsonl."""
        self._directory.write_rollouts(step, samples)

    def event(self, message: str) -> None:
        """Tells the user something and keeps it in run.log. Begin with `warning: ` to have it stand out."""
        message = self._directory.redactor.text(message)
        self._directory.log(message)
        self._console.event(message)

    def phase(self, name: str | None) -> None:
        """Shows what the run is doing now on a terminal; None is nothing in particular. Made for `PhaseTimer`."""
        self._console.phase(name)

    def close(self, exit_code: int, reason: str) -> None:
        """Ends the run's record; the first call counts.

        Args:
            exit_code: of the process.
            reason: `done`, `interrupted`, or the error's message.

        Raises:
            CannotWrite: the end of a run that is done cannot be written. Where another error ends the run, this one is
                a warning, so that it hides nothing.
        """
        if self._closed:
            return
        self._closed = True
        # The record first: an upload may be slow, and whoever waits for it may lose patience and interrupt.
        self._metrics.close()
        unwritten = self._write_end(exit_code, reason)
        try:
            with interrupts.raised():
                for backend in self._backends:
                    backend.finish(exit_code)
        except KeyboardInterrupt:
            self.event("warning: interrupted before all was uploaded; metrics.jsonl has everything")
        self._console.finish(exit_code, str(self._directory.path))
        self._directory.close()
        if unwritten is not None:
            raise unwritten

    def _write_end(self, exit_code: int, reason: str) -> CannotWrite | None:
        try:
            self._directory.finish(exit_code, reason)
        except CannotWrite as error:
            if exit_code == 0:
                return error
            self.event(f"warning: {error}")
        return None
