"""One Ray for all tests of a session: starting one takes as long as a short test."""

from __future__ import annotations

import os

import ray


def ensure_ray() -> None:
    """Starts a Ray of 4 CPUs in this process unless one is up. It ends with the process."""
    if not ray.is_initialized():
        os.environ.setdefault("RAY_worker_niceness", "0")  # as a run does
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="warning",
            object_store_memory=512 << 20,
        )
