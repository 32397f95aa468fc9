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


def start(
    folder: Path, *overrides: str, recipe: Path = TINY, module: tuple[str, ...] = ("nemo_rl_moe",)
) -> subprocess.Popen[str]:
    """A run in a process, a process group and with a Ray of its own, into `<folder>/run`."""
    command = [sys.executable, "-m", *module, "run", str(recipe), "logger.log_dir=run"]
    return subprocess.Popen(
        [*command, f"policy.model_name={MODEL}", "grpo.max_num_steps=1000", *overrides],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for_line(run: subprocess.Popen[str], beginning: str) -> None:
    """Reads what the run prints up to the line that begins so."""
    assert run.stdout is not None
    seen = []
    for line in run.stdout:
        seen.append(line)
        if line.startswith(beginning):
            return
    raise AssertionError("".join(seen))


def wait_for_child(run: subprocess.Popen[str], name: str) -> None:
    """Waits until the run has a child process with the name in its command line."""
    deadline = time.monotonic() + 60
    while not any(name in " ".join(child.cmdline()) for child in psutil.Process(run.pid).children()):
        assert time.monotonic() < deadline and run.poll() is None
        time.sleep(0.05)


def code_and_children(run: subprocess.Popen[str], *signals: signal.Signals) -> tuple[int, list[psutil.Process]]:
    """Signals the run's whole process group, 0.2 s apart. Returns the exit code and the children there had been."""
    children = psutil.Process(run.pid).children(recursive=True)
    try:
        for number in signals:
            os.killpg(run.pid, number)
            time.sleep(0.2)
        return run.wait(timeout=60), children
    finally:
        run.kill()


def test_sigterm_before_there_is_anything_to_clean_up_ends_a_run_with_130_at_once(tmp_path: Path) -> None:
    run = start(tmp_path)
    time.sleep(1.5)  # in the middle of its imports
    began = time.monotonic()
    assert code_and_children(run, signal.SIGTERM)[0] == 130
    assert time.monotonic() - began < 5
    assert not (tmp_path / "run").exists()


def test_sigterm_while_ray_starts_ends_a_run_with_130_and_leaves_no_process_of_ray(tmp_path: Path) -> None:
    run = start(tmp_path)
    wait_for_child(run, "gcs_server")
    time.sleep(0.5)
    code, children = code_and_children(run, signal.SIGTERM)
    assert code == 130
    assert len(children) >= 2  # a verifier, Ray
    assert ended(children, 10), [c.cmdline() for c in children if c.is_running()]
    assert not (tmp_path / "run").exists()


def test_a_terminal_that_closes_while_workers_start_leaves_nothing_and_a_manifest_that_says_so(tmp_path: Path) -> None:
    buffers, run = weight_buffers(), start(tmp_path)
    wait_for_line(run, "starting ")
    code, children = code_and_children(run, signal.SIGHUP)
    assert code == 130
    assert ended(children, 10), [c.cmdline() for c in children if c.is_running()]
    assert was_interrupted(tmp_path / "run")
    assert weight_buffers() <= buffers


def test_sigint_five_times_ends_a_run_with_130_and_no_process_or_buffer_is_left_after_10_s(tmp_path: Path) -> None:
    buffers, run = weight_buffers(), start(tmp_path)
    wait_for_line(run, "step 2/")
    code, children = code_and_children(run, *[signal.SIGINT] * 5)
    assert code == 130
    assert len(children) >= 3  # Ray, two workers, a verifier
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
