"""TRL's own virtual environment, and a run of its trainer in it."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.bench.child import run_child
from tools.bench.workloads import Workload

_HERE = Path(__file__).resolve().parent
_REQUIREMENTS = _HERE / "trl-requirements.txt"


def ensure(environment: Path) -> Path:
    """Makes the environment unless it is there with these requirements. Returns its Python."""
    python = environment / "bin" / "python"
    stamp = environment / f".installed-{hashlib.sha256(_REQUIREMENTS.read_bytes()).hexdigest()[:16]}"
    if not stamp.exists():
        print(f"making {environment} for TRL", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "-r", str(_REQUIREMENTS)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"pip could not install {_REQUIREMENTS.name}:\n{done.stderr[-4000:]}")
        stamp.touch()
    return python


def run_trainer(
    python: Path, folder: Path, workload: Workload, *, threads: int, steps: int, warmup: int, experts: str
) -> dict[str, Any]:
    """Runs GRPOTrainer on the workload in a child process. Returns what `trl_side.py` prints.

    Args:
        experts: which of transformers' expert kernels; the best one differs between models.

    Raises:
        RuntimeError: it failed, with the end of what it printed.
    """
    with tempfile.TemporaryDirectory(prefix="bench-trl-") as output:
        command = [str(python), str(_HERE / "trl_side.py"), f"--folder={folder}", f"--output={output}"]
        command += [f"--threads={threads}", f"--steps={steps}", f"--warmup={warmup}", f"--experts={experts}"]
        return run_child(command, threads=threads, name=f"TRL on {workload.name}")
