"""Risks of a generation worker that fails: samples are lost, a step trains on mixed weights, a run hangs, or leaves
processes and shared memory behind. The whole command, real workers, real signals."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from nemo_rl_moe.generation.dispatcher import Dispatcher
from nemo_rl_moe.generation.generator import Generator
from nemo_rl_moe.loops.run import load_data
from nemo_rl_moe.recipe.load import load_recipe
from nemo_rl_moe.refit.offer import WeightOffer
from tests.functional.cli import MODEL, RECIPES, metrics, run_recipe
from tests.functional.test_async import ASYNC, SHORT, prompt_ids
from tests.functional.test_interrupt import ended, start, weight_buffers

TWO_ENGINES = RECIPES / "grpo-tiny-moe-cpu-async-1off-2gen.yaml"
LIMIT_S = 3


def kill_in_the_middle_of_a_call(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Kills the worker of the n-th generation call as soon as it has it."""
    start, calls = Dispatcher._start, []

    def counted(self: Dispatcher, rank: int, *args: object, **kwargs: object) -> None:
        start(self, rank, *args, **kwargs)  # type: ignore[arg-type]
        calls.append(rank)
        if len(calls) == number:
            os.kill(self._generator.workers.pids()[rank], signal.SIGKILL)

    monkeypatch.setattr(Dispatcher, "_start", counted)


def kill_in_the_middle_of_an_update(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    """Worker 1 stands still when the update to the version begins and dies half a second into it."""
    update = Generator.update_weights

    def killed(self: Generator, offer: WeightOffer) -> None:
        if offer.version == version:
            pid = self.workers.pids()[1]
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
        update(self, offer)

    monkeypatch.setattr(Generator, "update_weights", killed)


def test_a_worker_killed_while_it_samples_and_one_killed_in_an_update_cost_no_sample_and_a_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each step is two calls at age 0, one for each worker, and samples with version 1 in the first step.
    kill_in_the_middle_of_a_call(monkeypatch, number=3)
    kill_in_the_middle_of_an_update(monkeypatch, version=3)
    recipe, buffers = tmp_path / "grpo-tiny-moe-cpu-split-2gen.yaml", weight_buffers()
    ahead = "{max_trajectory_age_steps: 0, max_generation_failures: 2}"
    recipe.write_text(f"defaults: {TWO_ENGINES}\ngrpo: {{max_num_steps: 3, async_grpo: {ahead}}}\n")
    done = run_recipe(recipe, tmp_path / "run", *SHORT, cwd=tmp_path)
    assert done.code == 0, done.text
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3]
    loader = load_data(load_recipe(recipe, [f"policy.model_name={MODEL}", *SHORT]).recipe).loader
    assert [prompt_ids(tmp_path / "run", s) for s in range(1, 4)] == [[p.id for p in next(loader)] for _ in range(3)]
    # The successors sample with the trainer's weights, like everybody else.
    assert [row["train/weight_version"] for row in rows] == [1, 2, 3]
    assert max(row["train/token_mult_prob_error"] for row in rows) < 1.001
    lines = [line for line in done.text.splitlines() if re.search("warning|died|Traceback", line)]
    assert len(lines) == 2, done.text
    assert re.fullmatch(
        r"warning: generation: generation rank 0 died: .*: starting it anew \(1 of at most 2 .*", lines[0]
    )
    what = "warning: refit: weight update to version 3: generation rank 1 died: "
    assert re.fullmatch(what + r".*: starting it anew \(2 of at most 2 between two steps\)", lines[1])
    assert weight_buffers() <= buffers


def test_a_receiver_that_stands_still_ends_the_run_at_the_limit_with_1_and_leaves_nothing(tmp_path: Path) -> None:
    buffers = weight_buffers()
    fault = ("tests.functional.stopped_receiver", "1")
    run = start(tmp_path, *SHORT, f"cluster.timeouts.refit_s={LIMIT_S}", recipe=ASYNC, module=fault)
    # Looked for again and again: which processes there are changes while the run starts.
    family: dict[int, psutil.Process] = {}
    commands: dict[int, list[str]] = {}
    try:
        while run.poll() is None:
            for process in psutil.Process(run.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    family[process.pid], commands[process.pid] = process, process.cmdline()
            time.sleep(0.5)
        printed, _ = run.communicate(timeout=10)
    finally:
        run.kill()
    assert run.returncode == 1, printed
    assert printed.endswith(
        f"failed: refit: weight update to version 1: no answer from generation rank 0 within {LIMIT_S} s\n"
    )
    assert "Traceback" not in printed
    assert any("EngineCore" in " ".join(line) for line in commands.values()), commands
    assert ended(list(family.values()), 10), [p.cmdline() for p in family.values() if p.is_running()]
    assert weight_buffers() <= buffers
