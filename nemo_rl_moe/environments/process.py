"""The driver's side of a verifier host and its workers."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rl_moe.errors import PhaseTimeout, RunFailed, UserError
from nemo_rl_moe.limits import VERIFIER_ANSWER_S
from nemo_rl_moe.recipe.schema import EnvConfig

_HEADER = struct.Struct("<Q")
_LINE_LIMIT = 300


class WorkerProcess:
    """One worker and the samples it was given.

    Attributes:
        pid: process id (also its process group).
        channel: socket to the worker.
        pending: indices of the samples it still owes a line for; the first of them is the one it is scoring.
        started: monotonic time at which it began that sample, or later if we read its last line late.
    """

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self.channel = channel
        self.pending: list[int] = []
        self.started = 0.0
        self._buffer = b""

    def send(self, indices: Sequence[int], samples: list[tuple[str, dict[str, Any]]]) -> None:
        """Gives an idle worker its next samples. Raises OSError when it is gone."""
        payload = pickle.dumps(samples, protocol=pickle.HIGHEST_PROTOCOL)
        self.channel.settimeout(VERIFIER_ANSWER_S)
        self.channel.sendall(_HEADER.pack(len(payload)) + payload)
        self.channel.setblocking(False)
        self.pending = list(indices)
        self.started = time.monotonic()

    def receive(self) -> list[tuple[str, Any]] | None:
        """The lines that have arrived, perhaps none; None when the worker is gone."""
        try:
            data = self.channel.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if lines:
            self.started = time.monotonic()
        return [tuple(json.loads(line)) for line in lines]


class VerifierHost:
    """A running host process that has imported one environment's verifier.

    Args:
        env_name: key under `env`, for messages.
        config: the environment's settings.
    """

    def __init__(self, env_name: str, config: EnvConfig) -> None:
        self.env_name = env_name
        self.verifier = config.verifier
        self._start_limit_s = config.start_timeout_s
        self._ready = False
        # A verifier may print, and the console is the run's. A file without a name until there is a run directory.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._control, theirs = socket.socketpair()
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        with theirs:
            self._process = subprocess.Popen(
                # -P: a module of the user's folder must not shadow one that the host imports.
                # -u: what a verifier prints is in the log before its process can be killed.
                [sys.executable, "-u", "-P", "-m", "nemo_rl_moe.environments.host", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": path},
                start_new_session=True,
            )
        # The working folder comes last: a user's module lies there, and the console script does not search it.
        self._hello = {"verifier": config.verifier, "path": [*sys.path, os.getcwd()]}

    def wait_ready(self) -> None:
        """Waits until the verifier is imported. Raises UserError when it cannot be."""
        error = self._ask(self._hello, "import of the verifier", self._start_limit_s)["error"]
        if error is not None:
            printed = self._last_line_printed()
            self.close()
            raise UserError(f"env.{self.env_name}.verifier: cannot load {self.verifier!r} ({error}){printed}")
        self._ready = True

    def log_to(self, path: Path) -> None:
        """Appends to the file whatever the verifier prints, and has printed so far. No worker may be there yet."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._output.seek(0)
        with path.open("ab") as log:
            shutil.copyfileobj(self._output, log)
        self._output.close()
        self._ask({"log": str(path.absolute())}, "change of its log file", VERIFIER_ANSWER_S)

    def start_worker(self) -> WorkerProcess:
        """A new idle worker."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                pid = self._ask({"spawn": True}, "start of a worker", VERIFIER_ANSWER_S, theirs)["pid"]
        except BaseException:
            ours.close()
            raise
        return WorkerProcess(pid, ours)

    def end_worker(self, worker: WorkerProcess) -> str:
        """Kills the worker if it still runs. Returns how it ended, in words."""
        worker.channel.close()
        status = int(self._ask({"end": worker.pid}, "end of a worker", VERIFIER_ANSWER_S)["status"])
        if status < 0:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(-status).name}"
        return f"exited with code {status}"

    def close(self) -> None:
        """Ends the host and with it all its workers; may be called twice."""
        self._output.close()
        self._control.close()
        if not self._ready:
            # It has no workers yet, and would notice the closed socket only at the end of its import.
            self._process.kill()
        try:
            self._process.wait(timeout=VERIFIER_ANSWER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _last_line_printed(self) -> str:
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"; the last line it printed: {last[:_LINE_LIMIT]}" if last else ""

    def _ask(
        self, message: dict[str, Any], phase: str, limit_s: float, attached: socket.socket | None = None
    ) -> dict[str, Any]:
        """One request and its answer."""
        who = f"the verifier host of env.{self.env_name}"
        self._control.settimeout(limit_s)
        try:
            data = json.dumps(message).encode() + b"\n"
            if attached is None:
                self._control.sendall(data)
            else:
                socket.send_fds(self._control, [data], [attached.fileno()])
            answer = b""
            while not answer.endswith(b"\n"):
                more = self._control.recv(1 << 16)
                if not more:
                    raise ConnectionResetError("it closed the connection")
                answer += more
        except BaseException as error:
            # Interrupted between question and answer, the next answer read would be this one's: end the host.
            self._control.close()
            if isinstance(error, TimeoutError):
                raise PhaseTimeout(f"reward: {phase}", who, limit_s) from error
            if isinstance(error, OSError):
                raise RunFailed(f"{who} is gone ({phase}: {error})") from error
            raise
        return json.loads(answer)
