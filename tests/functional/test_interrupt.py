"""Risk guarded: a stopped run leaves processes, shared memory or a manifest that says it is still going on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from tests.functional.cli import MODEL, REPO, TINY, metrics, run_recipe


def ended(processes: list[psutil.Process], limit_s: float) -> bool:
    """Whether all end within the limit; those that nobody has reaped yet have ended."""
    deadline = time.monotonic() + limit_s
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def weight_buffers() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("nemo_rl_moe-weights-")}


def was_interrupted(run_dir: Path) -> bool:
    manifest = json.loads((run_dir / "manifest.json").read_text())
    return (manifest["exit_code"], manifest["reason"]) == (130, "interrupted")


def test_sigint_ends_a_run_with_130_and_no_process_or_buffer_is_left_after_10_s(tmp_path: Path) -> None:
    buffers = weight_buffers()
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
    run.send_signal(signal.SIGINT)
    try:
        assert run.wait(timeout=60) == 130
    finally:
        run.kill()
    assert ended(children, 10), [c.cmdline() for c in children if c.is_running()]
    assert was_interrupted(tmp_path / "run")
    assert weight_buffers() <= buffers


def test_sigterm_on_a_ray_that_was_up_ends_the_runs_workers_and_leaves_ray_up(tmp_path: Path) -> None:
    run_dir, workers, buffers = tmp_path / "run", [], weight_buffers()

    def stop() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not ((run_dir / "metrics.jsonl").exists() and metrics(run_dir)):
            time.sleep(0.2)
        everything = psutil.process_iter(["cmdline"])
        workers.extend(p for p in everything if "ray::ActorHost" in " ".join(p.info["cmdline"] or []))
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    outcome = run_recipe(TINY, run_dir, "grpo.max_num_steps=1000", cwd=tmp_path)
    assert outcome.code == 130, outcome.text
    assert len(workers) >= 2
    assert ended(workers, 10)
    assert was_interrupted(run_dir)
    assert weight_buffers() <= buffers
