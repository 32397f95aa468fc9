"""How much memory a worker has needed at most."""

from __future__ import annotations

from pathlib import Path

import torch


def peak_gib(device: torch.device) -> float:
    """Most memory that this process has held since it began, in GiB.

    On a GPU, what torch had allocated there. On a CPU, resident memory, libraries and shared pages included; the kernel
    counts it from the start of the program, unlike getrusage, which starts from the parent's peak.

    Raises:
        RuntimeError: the kernel does not tell.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 2**20
    raise RuntimeError("/proc/self/status has no VmHWM")
