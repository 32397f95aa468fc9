"""The live view: what it shows, that it follows a run that is being written, and that it ends when asked."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from nemo_rl_moe.cli import main
from nemo_rl_moe.compare.read import read_run
from nemo_rl_moe.compare.run_data import RunData, series
from nemo_rl_moe.compare.watch import views
from nemo_rl_moe.compare.watch.feed import Feed
from nemo_rl_moe.recipe.load import load_recipe
from nemo_rl_moe.tracking.run_dir import RunDirectory
from tests.unit.compare.published import NEMOTRON, SYNC, metrics, rows, write_run
from tests.unit.tracking.conftest import RECIPE

REPO = Path(__file__).resolve().parents[3]
LINES = [json.dumps(row) + "\n" for row in rows(SYNC, 1)]


def shown(view: Any, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(view)
    return console.file.getvalue()  # type: ignore[attr-defined]


def lines_with(text: str, word: str) -> list[str]:
    return [line for line in text.splitlines() if word in line]


def test_a_course_goes_from_the_lowest_block_to_the_highest_and_marks_what_was_not_finite() -> None:
    assert views.sparkline(series(range(1, 9), range(8)), 80).plain == "▁▂▃▄▅▆▇█"
    assert views.sparkline(series([1, 2, 3], [0.0, np.nan, 1.0]), 80).plain == "▁!█"
    assert views.sparkline(series([1, 2], [3.0, 3.0]), 80).plain == "▁▁"
    assert len(views.sparkline(series(range(1, 10_001), range(10_000)), 30).plain) == 30


def test_bars_of_the_last_steps_have_one_scale_and_their_parts_the_steps_shares() -> None:
    names = {"total_step_time": [4.0, 2.0], "exposed_generation": [1.0, 1.0], "policy_training": [3.0, 1.0]}
    found = {f"timing/train/{name}": series([1, 2], values) for name, values in names.items()}
    text = shown(views.timeline(RunData("r", Path("r"), "run directory", found), 60))
    first, second = lines_with(text, "step 1")[0], lines_with(text, "step 2")[0]
    assert (first.count("█"), second.count("█")) == (40, 20)
    assert "generation 33 %" in text and "policy training 67 %" in text


def test_the_overview_has_the_last_value_and_the_mean_of_the_last_ten(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", NEMOTRON, 1))
    values = metrics(NEMOTRON, 1)["train/reward"]
    line = lines_with(shown(views.overview(run, 110)), "reward")[0]
    last, mean = map(float, line.split()[1:3])
    assert (last, mean) == pytest.approx((values[-1], values[-10:].mean()), abs=1e-5)


def test_the_head_says_state_progress_and_why_a_run_ended(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", SYNC, 1, steps=12, exit_code=1, reason="CUDA out of memory")
    text = views.head(read_run(run), None, 40).plain
    assert "run  out of memory  step 12 of 20" in text.splitlines()[0]
    assert "ended at step 12 of 20 (out of memory): CUDA out of memory" in text
    done = views.head(read_run(write_run(tmp_path / "done", SYNC, 1)), None, 40)
    assert "done  step 20 of 20" in done.plain and len(done.plain.splitlines()) == 2


def test_of_40_cells_of_progress_12_of_20_steps_fill_24(tmp_path: Path) -> None:
    text = views.head(read_run(write_run(tmp_path / "run", SYNC, 1, steps=12)), None, 40)
    cells = {span.style: text.plain[span.start : span.end].count("━") for span in text.spans}
    assert (cells["cyan"], cells[views.SOFT]) == (24, 16)


def test_a_narrow_terminal_keeps_labels_and_last_values(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", NEMOTRON, 1))
    text = shown(views.overview(run, 54), 54)
    assert "last 10" not in text and "…" not in text and max(map(len, text.splitlines())) <= 54
    assert "train/gen_kl_error" in shown(views.all_metrics(run, 54), 54)


@pytest.fixture
def running(tmp_path: Path) -> Any:
    """A run directory held by this process, with 5 steps."""
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE)
    loaded = load_recipe(path, [f"logger.log_dir={tmp_path / 'run'}", "grpo.max_num_steps=20"], check=False)
    directory = RunDirectory.open(loaded, resume=False)
    directory.metrics_path.write_text("".join(LINES[:5]))
    yield directory
    directory.close()


def polled(feed: Feed) -> bool:
    """A poll that does not wait for the time between two reads."""
    feed._not_before = 0.0
    return feed.poll()


def test_the_feed_reads_again_when_a_line_is_whole_and_not_before(running: RunDirectory) -> None:
    feed = Feed(running.path)
    assert (feed.run.ending.state, feed.run.training_steps[-1]) == ("running", 5)
    assert not polled(feed)
    with running.metrics_path.open("a") as file:
        file.write(LINES[5][:50])
        file.flush()
        polled(feed)
        assert feed.run.training_steps[-1] == 5 and list(feed.run.flaws) == []
        file.write(LINES[5][50:])
    assert polled(feed) and feed.run.training_steps[-1] == 6


def test_a_run_that_is_killed_changes_no_file_and_is_seen_to_be_dead(running: RunDirectory) -> None:
    feed = Feed(running.path)
    running.close()
    assert polled(feed) and feed.run.ending.cause == "killed"
    assert not polled(feed)


def test_a_file_that_cannot_be_read_leaves_the_last_state_and_says_why_until_it_can(running: RunDirectory) -> None:
    feed, config = Feed(running.path), running.path / "config.yaml"
    whole = config.read_text()
    config.write_text("a: [1")
    assert polled(feed) and "config.yaml" in str(feed.error) and feed.run.training_steps[-1] == 5
    assert str(config) in views.head(feed.run, feed.error).plain.replace("\n", "")
    config.write_text(whole)
    assert polled(feed) and feed.error is None


def test_a_new_run_in_the_same_place_is_shown_from_its_beginning(running: RunDirectory) -> None:
    feed = Feed(running.path)
    running.close()
    running.path.rename(running.path.with_name("run.1"))
    assert polled(feed) and "no such file or folder" in str(feed.error)
    write_run(running.path, SYNC, 1, steps=2)
    assert polled(feed) and feed.error is None and feed.run.training_steps.tolist() == [1, 2]


def in_app(feed: Feed, script: Callable[[Any, Callable[[], str]], Awaitable[None]], size: tuple[int, int]) -> None:
    """Runs a script of keys in the app; `screen()` is the text that the terminal shows."""
    from nemo_rl_moe.compare.watch import app as module

    async def go() -> None:
        app = module.WatchApp(feed)
        async with app.run_test(size=size) as pilot:

            def screen() -> str:
                return "\n".join(
                    "".join(segment.text for segment in app.screen._compositor.render_strips()[y])
                    for y in range(app.size.height)
                )

            await script(pilot, screen)

    asyncio.run(go())


def test_the_app_follows_a_run_and_its_keys_show_samples_metrics_and_the_log(
    running: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each key waits for a moment without work, which an app that looks all the time has none of.
    monkeypatch.setattr("nemo_rl_moe.compare.watch.app.WATCH_POLL_S", 0.2)
    monkeypatch.setattr("nemo_rl_moe.compare.watch.feed._SPARSE", 0)
    for step in (1, 2, 3):
        running.write_rollouts(step, [{"problem": f"[bold]{step}[/bold]", "response": "\x1b[2J[red]", "reward": 0.5}])
    running.log("x" * 60)
    running.log("the last event")

    async def until(screen: Callable[[], str], pilot: Any, text: str) -> None:
        for _ in range(200):
            if text in screen():
                return
            await pilot.pause(0.02)
        raise AssertionError(f"{text!r} not in\n{screen()}")

    async def script(pilot: Any, screen: Callable[[], str]) -> None:
        await until(screen, pilot, "step 5 of 20")
        with running.metrics_path.open("a") as file:
            file.write("".join(LINES[5:7]))
        await until(screen, pilot, "step 7 of 20")
        assert "running" in screen() and "left" in screen()
        await pilot.press("2")
        await until(screen, pilot, "step 3 (3 of 3 steps with samples)")
        assert "[bold]3[/bold]" in screen() and "\ufffd[2J[red]" in screen() and "reward 0.5" in screen()
        await pilot.press("p", "p", "p")
        await until(screen, pilot, "step 1 (1 of 3")
        await pilot.press("n")
        await until(screen, pilot, "step 2 (2 of 3")
        await pilot.press("l")
        await until(screen, pilot, "step 3 (3 of 3")
        running.write_rollouts(4, [{"problem": "new", "response": "r", "reward": 1.0}])
        await until(screen, pilot, "step 4 (4 of 4")
        await pilot.press("3")
        await until(screen, pilot, "train/gen_kl_error")
        await pilot.press("4")
        await until(screen, pilot, "the last event")
        running.finish(1, "RuntimeError: it broke")
        await until(screen, pilot, "ended at step 7 of 20 (error): RuntimeError: it broke")

    in_app(Feed(running.path), script, (100, 30))


def test_in_a_terminal_the_view_comes_up_and_q_ends_it_with_0(tmp_path: Path) -> None:
    run = write_run(tmp_path / "some-run", SYNC, 1)
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "nemo_rl_moe", "watch", str(run)],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "PYTHONPATH": str(REPO), "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"},
    )
    os.close(slave)
    seen, until = b"", time.monotonic() + 60
    try:
        while b"reward" not in seen and time.monotonic() < until:
            if select.select([master], [], [], 0.2)[0]:
                seen += os.read(master, 65536)
        assert b"some-run" in seen and b"reward" in seen
        os.write(master, b"q")
        while process.poll() is None and time.monotonic() < until:
            # The last reader of a terminal whose program has ended gets an error.
            with contextlib.suppress(OSError):
                if select.select([master], [], [], 0.1)[0]:
                    seen += os.read(master, 65536)
        assert process.wait(5) == 0
        # The terminal is given back as it was.
        assert seen.count(b"\x1b[?1049h") == seen.count(b"\x1b[?1049l") == 1
    finally:
        process.kill()
        os.close(master)


def test_without_a_terminal_it_is_a_user_error_that_names_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", SYNC, 1)
    assert main(["watch", str(run)]) == 2
    assert "not a terminal; `nemo-rl-moe report" in capsys.readouterr().err
    assert main(["watch", str(tmp_path / "none")]) == 2


def test_without_textual_it_is_a_user_error_that_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class FakeTerminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    run = write_run(tmp_path / "run", SYNC, 1)
    monkeypatch.setattr(sys, "stdin", FakeTerminal())
    monkeypatch.setattr(sys, "stdout", FakeTerminal())
    monkeypatch.setitem(sys.modules, "textual", None)
    monkeypatch.delitem(sys.modules, "nemo_rl_moe.compare.watch.app", raising=False)
    assert main(["watch", str(run)]) == 2
    assert "needs the textual package (pip install textual)" in capsys.readouterr().err


def test_at_every_width_no_number_of_all_metrics_is_cut(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", SYNC, 1))
    for width in (40, 60, 78, 94, 114, 200):
        lines = shown(views.all_metrics(run, width), width).splitlines()
        reward = next(line for line in lines if line.startswith("train/reward"))
        assert reward.split()[1] == "0.58871" and "…" not in reward
        assert max(map(len, lines)) <= width
    assert lines[0].split() == ["last", "unit", "lowest", "highest", "at", "step"]


def test_a_run_that_is_deleted_while_it_is_read_is_told_in_words(
    running: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = Feed(running.path)
    running.metrics_path.write_text("".join(LINES[:6]))

    def gone(path: Path) -> bytes:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr(Path, "read_bytes", gone)
    assert polled(feed) and "metrics.jsonl: cannot read (No such file or directory)" in str(feed.error)
