"""A folder of pairs gives the published summary: what completed in tables, what did not with its cause."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest

from nemo_rl_moe.cli import main
from nemo_rl_moe.compare.suite import read_suite, summary
from nemo_rl_moe.compare.window import Window
from nemo_rl_moe.errors import UserError
from tests.chromium import Page
from tests.unit.compare.looks import assert_readable
from tests.unit.compare.published import NEMOTRON, QWEN_235B, SYNC, WORKLOADS, write_run

BLOCKED = "Nemotron3 Super / Sync / BF16"
LONE = "Qwen3-235B-A22B / Sync 16n4g / BF16"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The four completed workloads, one that ran out of memory on both sides, and one whose run never started."""
    root = tmp_path_factory.mktemp("suite") / "gb200"
    for workload in WORKLOADS:
        for arm, name in enumerate(("base", "hybridep")):
            write_run(root.joinpath(*workload.split(" / ")) / name, workload, arm)
    oom = {"steps": 1, "exit_code": 1, "reason": "OutOfMemoryError: 883 of 909 GiB of host memory"}
    for arm, name in enumerate(("base", "hybridep")):
        write_run(root.joinpath(*BLOCKED.split(" / ")) / name, SYNC, arm, **oom)
    late = {"steps": 3, "exit_code": 1, "reason": "Watchdog caught collective operation timeout: ALLGATHER"}
    write_run(root.joinpath(*LONE.split(" / ")) / "base", SYNC, 0, **late)
    return root


def command(*arguments: str | Path) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        assert main(["compare", *map(str, arguments)]) == 0
    return out.getvalue()


def test_four_workloads_are_completed_and_two_blocked_with_their_causes(folder: Path) -> None:
    suite = read_suite(folder, Window(2, 20))
    assert {name for name, _ in suite.completed} == set(WORKLOADS)
    reasons = {each.name: each.reasons for each in suite.blocked}
    assert set(reasons) == {BLOCKED, LONE}
    assert reasons[BLOCKED][0].startswith("base: ended at step 1 of 20 (out of memory): OutOfMemoryError")
    assert reasons[BLOCKED][2].startswith("hybridep: ended at step 1 of 20 (out of memory)")
    assert reasons[LONE][0] == "nothing to compare base with"
    assert reasons[LONE][1].startswith("base: ended at step 3 of 20 (time-out): Watchdog caught")


def test_the_summary_has_the_published_cells(folder: Path) -> None:
    tables = {table.title: table for table in summary(read_suite(folder, Window(2, 20)))}
    times, rates = tables["Step time, seconds"], tables["Throughput, tokens/s per GPU"]
    row = dict(zip(times.head, next(r for r in times.rows if r[0] == SYNC), strict=True))
    assert (row["GPUs"], row["matched"]) == ("16", "yes")
    assert row["end to end"] == "180.69 → 160.72 (-11.1 %)"
    row = dict(zip(rates.head, next(r for r in rates.rows if r[0] == NEMOTRON), strict=True))
    assert row["end to end, mean of rates"].startswith("142.91 → 166.35 (+16.4 %)")
    assert row["end to end, whole window"].startswith("111.91 → 117.98 (+5.4 %)")
    accuracy = {r[0]: r for r in tables["Last validation in common"].rows}
    assert accuracy[QWEN_235B][1:3] == ["20", "66.67 % → 60.00 % (-6.67 points)"]
    assert "1 sample of 15" in accuracy[QWEN_235B][4]


def test_a_cell_whose_interval_spans_zero_is_marked_and_others_are_not(folder: Path) -> None:
    text = command("--suite", folder, "--steps", "2-20")
    assert "54.01 → 53.25 (-1.4 %) °" in text and "127.16 → 120.27 (-5.4 %)  " in text
    assert "° no difference shown" in text


def test_without_steps_given_a_pair_that_never_got_past_the_warm_up_is_blocked_over_the_planned_steps(
    folder: Path,
) -> None:
    reasons = {each.name: each.reasons for each in read_suite(folder).blocked}[BLOCKED]
    assert [r.partition(": ")[2] for r in reasons if "out of memory" not in r] == [
        "0 of 19 steps logged; missing 2-20"
    ] * 2
    assert sum("ended at step 1 of 20 (out of memory)" in reason for reason in reasons) == 2


def test_without_steps_and_plans_a_pair_is_blocked_for_want_of_steps(tmp_path: Path) -> None:
    for arm, name in enumerate(("base", "run")):
        write_run(tmp_path / "w" / name, SYNC, arm, steps=1)
        (tmp_path / "w" / name / "config.yaml").unlink()
    (found,) = read_suite(tmp_path).blocked
    assert found.pair is None and "step 1 logged, expected steps after step 1" in found.reasons[0]


def test_json_and_markdown_have_completed_and_blocked_apart(folder: Path) -> None:
    read = json.loads(command("--suite", folder, "--steps", "2-20", "--json"))
    assert {each["workload"] for each in read["completed"]} == set(WORKLOADS)
    assert {each["workload"] for each in read["blocked"]} == {BLOCKED, LONE}
    text = command("--suite", folder, "--steps", "2-20", "--markdown")
    assert text.startswith("## ") and "4 completed, 2 blocked; steps 2-20" in text.splitlines()[0]
    assert f"- **{BLOCKED}**: base: ended at step 1" in text
    own = [line.count("|") for line in text.splitlines() if line.startswith("| Qwen3-30B-A3B / Sync")]
    heads = [line.count("|") for line in text.splitlines() if line.startswith("| workload")]
    assert own == heads == [8, 6, 5, 6]


def test_the_suites_page_can_be_read_and_opens_each_pair(browser: Page, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    command("--suite", folder, "--steps", "2-20", "--html", file)
    assert_readable(browser, file)
    browser.open(file)
    assert browser.evaluate("document.querySelectorAll('details').length") == 4
    browser.evaluate("document.querySelector('details summary').click()")
    assert "+16.4 %" in browser.evaluate("document.querySelector('details .stack').innerText")


def test_two_baselines_no_baseline_and_a_broken_run_are_blocked_and_named(tmp_path: Path) -> None:
    for name in ("two/base", "two/baseline", "two/run", "none/a", "none/b", "broken/base"):
        write_run(tmp_path / name, SYNC, 0)
    write_run(tmp_path / "broken/run", SYNC, 1)
    (tmp_path / "broken/run/metrics.jsonl").write_text("{\n")
    reasons = {each.name: each.reasons[0] for each in read_suite(tmp_path).blocked}
    assert reasons["two"] == "2 baselines among base, baseline"
    assert reasons["none"] == "no baseline (a run whose name begins with base) among a, b"
    assert "metrics.jsonl:1: not JSON" in reasons["broken"]


def test_a_baseline_with_two_runs_is_two_workloads(tmp_path: Path) -> None:
    for name, arm in (("base", 0), ("first", 1), ("second", 1)):
        write_run(tmp_path / "w" / name, SYNC, arm)
    assert [name for name, _ in read_suite(tmp_path).completed] == ["w / first", "w / second"]


def test_exported_histories_make_a_pair_with_their_configurations(tmp_path: Path) -> None:
    for arm, name in enumerate(("base", "run")):
        run = write_run(tmp_path / "runs" / name, SYNC, arm)
        (tmp_path / "w").mkdir(exist_ok=True)
        (run / "metrics.jsonl").rename(tmp_path / f"w/{name}.jsonl")
        (run / "config.yaml").rename(tmp_path / f"w/{name}.config.yaml")
        (run / "manifest.json").unlink()
    ((name, pair),) = read_suite(tmp_path).completed
    assert (name, pair.differences.verdict) == ("w", "matched")


def test_a_folder_without_pairs_and_both_ways_of_naming_runs_are_user_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="no pair in it"):
        read_suite(tmp_path)
    assert main(["compare", "a", "b", "--suite", str(tmp_path)]) == 2
    assert "expected either runs or --suite DIR" in capsys.readouterr().err


def test_links_to_folders_above_and_to_themselves_are_not_followed_and_others_are(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(folder)
    (tmp_path / "pair").mkdir()
    for arm, name in enumerate(("base", "run")):
        write_run(tmp_path / "pair" / name, SYNC, arm)
    (tmp_path / "pair/up").symlink_to(tmp_path)
    (tmp_path / "self").symlink_to(tmp_path / "self")
    found = [each.name for each in read_suite(tmp_path).workloads]
    assert found.count("pair") == 1 and not [name for name in found if "/ up" in name]
    assert sum(name.startswith("linked / ") for name in found) == len(read_suite(folder).workloads)
