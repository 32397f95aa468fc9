"""Risk guarded: a stopped run leaves processes, shared memory or a manifest that says it is still going on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.functional.cli import MODEL, REPO, TINY


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_ends_a_run_with_130_and_no_process_or_buffer_is_left_after_10_s(tmp_path: Path, sent: int) -> None:
    buffers = set(os.listdir("/dev/shm"))
    command = [sys.executable, "-m", "nemo_rl_moe", "run", str(TINY)]
    run = subprocess.Popen(
        [*command, "logger.log_dir=run", f"policy.model_name={MODEL}", "grpo.max_num_steps=1000"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.stdout is not None
    seen = []
    for line in run.stdout:
        seen.append(line)
        if line.startswith("step 2/"):
            break
    children = psutil.Process(run.pid).children(recursive=True)
    assert len(children) >= 3, "".join(seen)  # Ray, two workers, a verifier
    run.send_signal(sent)
    try:
        assert run.wait(timeout=60) == 130
    finally:
        run.kill()
    deadline = time.monotonic() + 10
    while any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in children):
        assert time.monotonic() < deadline, [c.cmdline() for c in children if c.is_running()]
        time.sleep(0.2)
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    assert (manifest["exit_code"], manifest["reason"]) == (130, "interrupted")
    assert set(os.listdir("/dev/shm")) <= buffers
