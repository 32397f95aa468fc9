"""The verifier host: a small process that imports a verifier once and forks workers that can be killed.

Run as ``python -m nemo_rl_moe.environments.host CONTROL_FD``. A fork takes a few milliseconds where a fresh process
that imports sympy takes a second, so a worker that hung or crashed is replaced almost for free.

Who outlives whom: the driver's death closes the control socket, at which the host kills its workers and exits; the
host's death kills the workers by PR_SET_PDEATHSIG. That signal comes when the *thread* that forked ends, so it is
used only below this single-threaded process, never in the driver.

Control socket, one JSON object a line. From the driver, first ``{"verifier", "path"}``, answered by ``{"error"}``; then
``{"log": path}``, a file for all that is printed, answered by ``{}``; ``{"spawn": true}`` with the worker's socket
attached, answered by ``{"pid"}``; or ``{"end": pid}``, answered by ``{"status"}`` (as subprocess's returncode) once
that worker is dead and reaped.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from numbers import Real
from typing import Any

from nemo_rl_moe.environments.verifiers import VerifyFunction, load_verifier

_PR_SET_PDEATHSIG = 1
_MESSAGE_LIMIT = 2000
# Rewards travel as float32, in which anything larger is infinite.
_LARGEST_REWARD = 3.4028234e38
_HEADER = struct.Struct("<Q")


def main(control_fd: int) -> None:
    """Serves the control socket until the driver closes it."""
    control = socket.socket(fileno=control_fd)
    request, _ = _receive(control)
    if request is None:
        return
    sys.path[:] = request["path"]
    error, verify = None, None
    try:
        verify = load_verifier(request["verifier"])
    except BaseException as caught:
        error = f"{type(caught).__name__}: {caught}"
    _answer(control, {"error": error})
    if verify is None:
        return
    # Frozen objects are never touched by a worker's garbage collector, so their pages stay shared.
    gc.collect()
    gc.freeze()
    _serve(control, verify)


def _serve(control: socket.socket, verify: VerifyFunction) -> None:
    workers: set[int] = set()
    try:
        while True:
            request, fds = _receive(control)
            if request is None:
                return
            if "spawn" in request:
                pid = _fork_worker(control, fds[0], verify)
                os.close(fds[0])
                workers.add(pid)
                _answer(control, {"pid": pid})
            elif "log" in request:
                _print_to(request["log"])
                _answer(control, {})
            else:
                workers.discard(request["end"])
                _answer(control, {"status": _kill(request["end"])})
    finally:
        for pid in workers:
            _kill(pid)


def _print_to(path: str) -> None:
    """File descriptors, not sys.stdout: what a verifier starts prints too."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)


def _kill(pid: int) -> int:
    """Kills a worker with whatever it started, and reaps it. Returns its exit status, negative for a signal.

    Only this process reaps, so the id cannot have been given to another process.
    """
    try:
        done, status = os.waitpid(pid, os.WNOHANG)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        if not done:
            _, status = os.waitpid(pid, 0)
    except ChildProcessError:  # the verifier's module ignores SIGCHLD, so the system reaps by itself
        return 0
    return os.waitstatus_to_exitcode(status)


def _fork_worker(control: socket.socket, fd: int, verify: VerifyFunction) -> int:
    host = os.getpid()
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # both sides set it, so that it holds whoever comes first
        return pid
    code = 1
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != host:
            os._exit(1)  # the host died before the line above
        control.close()
        _work(socket.socket(fileno=fd), verify)
        code = 0
    finally:
        # Never back into the host's loop, and no exit handlers of what the host imported.
        os._exit(code)


def _work(channel: socket.socket, verify: VerifyFunction) -> None:
    """Scores chunks of samples until the driver closes the channel; one line for each sample, at once."""
    reader = channel.makefile("rb")
    while header := reader.read(_HEADER.size):
        samples: list[tuple[str, dict[str, Any]]] = pickle.loads(reader.read(_HEADER.unpack(header)[0]))
        for response, metadata in samples:
            channel.sendall(json.dumps(_score(verify, response, metadata)).encode() + b"\n")


def _score(verify: VerifyFunction, response: str, metadata: dict[str, Any]) -> tuple[str, Any]:
    """("ok", reward), ("raised", message) or ("bad", what was returned instead of a number)."""
    try:
        value = verify(response, metadata)
    except BaseException as error:  # SystemExit too: a verifier cannot end the worker by raising
        frames = traceback.extract_tb(error.__traceback__)
        at = f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        return ("raised", f"{type(error).__name__}: {error}"[:_MESSAGE_LIMIT] + at)
    if isinstance(value, Real):
        with contextlib.suppress(OverflowError):  # an int too large for a float
            reward = float(value)
            if abs(reward) <= _LARGEST_REWARD:  # False for NaN too
                return ("ok", reward)
    return ("bad", f"{_short(value)} ({type(value).__name__})")


def _short(value: Any) -> str:
    try:
        return repr(value)[:200]
    except Exception:
        return "a value"


def _receive(control: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The next request with its attached sockets; None when the driver has gone."""
    data, fds, _, _ = socket.recv_fds(control, 65536, 1)
    while data and not data.endswith(b"\n"):
        more = control.recv(65536)
        if not more:
            return None, list(fds)
        data += more
    return (json.loads(data) if data else None), list(fds)


def _answer(control: socket.socket, message: dict[str, Any]) -> None:
    control.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    # An interrupt at the terminal is the driver's to handle; it closes the control socket when it is done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(int(sys.argv[1]))
