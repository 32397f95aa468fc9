"""The report of one run: its numbers, where its time went, and a page with samples that anybody may have written."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_rl_moe.cli import main
from nemo_rl_moe.compare.one_run import report
from nemo_rl_moe.compare.page import charts
from nemo_rl_moe.compare.phases import split
from nemo_rl_moe.compare.read import read_run
from nemo_rl_moe.compare.report_text import lines
from nemo_rl_moe.compare.run_data import RunData, series
from nemo_rl_moe.compare.samples import read_samples, sampled_steps
from nemo_rl_moe.compare.window import Window
from tests.chromium import Page
from tests.unit.compare.looks import assert_readable
from tests.unit.compare.published import NEMOTRON, QWEN_235B, SYNC, metrics, write_run

HOSTILE = '</script><script>document.title = "taken"</script><img src=x onerror="document.title = 1">'


def command(*arguments: str | Path) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        assert main(["report", *map(str, arguments)]) == 0
    return out.getvalue()


def write_samples(run: Path, step: int, *samples: Any) -> None:
    (run / "rollouts").mkdir(exist_ok=True)
    text = "".join(s if isinstance(s, str) else json.dumps(s) + "\n" for s in samples)
    (run / f"rollouts/step_{step}.jsonl").write_text(text)


def timed(**seconds: list[float]) -> RunData:
    found = {
        f"timing/train/{name}": series(list(range(1, len(values) + 1)), values) for name, values in seconds.items()
    }
    return RunData("run", Path("run"), "run directory", found)


def as_lists(run: RunData) -> dict[str, list[float]]:
    return {label: np.round(values, 9).tolist() for label, values in split(run).parts.items()}


def test_the_parts_of_a_step_of_10_seconds_add_up_to_10() -> None:
    run = timed(
        total_step_time=[10.0, 10.0],
        generation=[4.0, 3.0],
        exposed_generation=[4.0, 3.0],
        policy_and_reference_logprobs=[1.0, 1.0],
        policy_training=[2.0, 2.0],
        weight_sync=[0.5, 0.5],
        reward=[1.0, 1.0],
        data=[0.5, 0.5],
        validation=[0.0, 1.5],
        other=[1.0, 0.5],
    )
    found = split(run)
    assert found.seconds.tolist() == [10.0, 10.0]
    assert as_lists(run) == {
        "generation": [4, 3],
        "log-probabilities": [1, 1],
        "policy training": [2, 2],
        "refit": [0.5, 0.5],
        "validation and checkpoints": [0, 1.5],
        "scoring and data": [1.5, 1.5],
        "other": [1, 0.5],
    }


def test_what_ran_beside_the_step_is_no_part_of_it() -> None:
    run = timed(
        total_step_time=[3.0],
        generation=[2.8],
        exposed_generation=[0.2],
        policy_training=[2.5],
        reward=[2.0],
        data=[1.0],
        other=[0.3],
    )
    assert as_lists(run) == {"generation": [0.2], "policy training": [2.5], "other": [0.3]}


def test_of_a_source_that_logs_no_other_the_rest_is_other_and_generation_is_all_of_it() -> None:
    run = timed(total_step_time=[5.0, np.nan, 6.0], generation=[2.0, 1.0, 2.0], reward=[1.0, 1.0, 1.0])
    assert split(run).steps.tolist() == [1, 3]
    assert as_lists(run) == {"generation": [2, 2], "scoring and data": [1, 1], "other": [2, 3]}


def test_means_ends_and_extremes_are_those_of_the_window(tmp_path: Path) -> None:
    found = report(read_run(write_run(tmp_path / "run", NEMOTRON, 1)))
    rows = {(each.row.key, each.kind): each for each in found.rows}
    values = metrics(NEMOTRON, 1)["timing/train/total_step_time"][1:]
    row = rows["step_time.e2e", "mean"]
    # 19 steps: the first and the last nine, so that no step is in both.
    expected = [53.25, values[:9].mean(), values[-9:].mean(), values.min(), values.max()]
    assert row.numbers == pytest.approx(expected, abs=0.005)
    assert rows["throughput.e2e", "mean of rates"].value == pytest.approx(166.35, abs=0.005)
    assert rows["throughput.e2e", "whole window"].value == pytest.approx(117.98, abs=0.005)
    assert found.health.window == Window(2, 20)


def test_a_validation_of_15_samples_has_wilsons_interval(tmp_path: Path) -> None:
    (found,) = report(read_run(write_run(tmp_path / "run", QWEN_235B, 1))).validations
    # 9 of 15.
    assert (found.step, found.samples) == (20, 15)
    assert found.interval == pytest.approx((0.3575, 0.8018), abs=5e-5)


def test_a_run_that_died_is_reported_with_its_cause_and_the_steps_that_it_has(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", SYNC, 1, steps=7, exit_code=1, reason="CUDA out of memory")
    text = "\n".join(lines(report(read_run(run))))
    assert "ended at step 7 of 20 (out of memory): CUDA out of memory" in text
    assert "steps 2-7, by logged step number: 6 observations" in text


def test_missing_steps_are_said_beside_every_number_that_lacks_them(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", SYNC, 1)
    kept = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(kept[:6] + kept[8:]) + "\n")
    found = report(read_run(run))
    assert {each.note for each in found.rows} == {"of 17 of 19 steps"}
    assert "17 of 19 steps logged; missing 7-8" in found.health.problems


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_of_no_step_or_of_one_has_a_report(tmp_path: Path, steps: int) -> None:
    run = write_run(tmp_path / "run", SYNC, 1, steps=steps)
    (run / "config.yaml").unlink()
    found = report(read_run(run))
    assert found.health.window == Window(1, 1) and len(found.rows) == (0 if not steps else 11)
    assert ("0 of 1 steps logged; missing 1" in found.health.problems) == (not steps)
    assert "</html>" in _page(run, tmp_path / "page.html").read_text()


def test_json_has_the_numbers_the_validations_and_the_shares(tmp_path: Path) -> None:
    read = json.loads(command(write_run(tmp_path / "run", SYNC, 0), "--steps", "2-20", "--json"))
    rows = {(row["key"], row["kind"]): row for row in read["metrics"]}
    assert round(rows["step_time.e2e", "mean"]["value"], 2) == 180.69
    assert read["validations"][0]["samples"] == 256 and read["run"]["state"] == "done"
    assert sum(read["time_shares"].values()) == pytest.approx(1)


def test_samples_of_other_shapes_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    write_samples(
        tmp_path,
        3,
        {"problem": "p", "response": None, "reward": None},
        {"response": "x" * 20_000, "reward": True, "truncated": 1},
        '{"reward": ' + "9" * 400 + "}\n",
        "[1]\n{broken\n",
    )
    (tmp_path / "rollouts/step_x.jsonl").write_text("")
    assert sampled_steps(tmp_path / "rollouts") == [3]
    found, flaws = read_samples(tmp_path / "rollouts", 3)
    assert [s.reward for s in found] == [None, None, None] and not any(s.truncated for s in found)
    assert "[… 14000 characters left out …]" in found[1].response and found[0].response == ""
    assert flaws[0].startswith("step_3.jsonl: lines 4-5 left out")


def _page(run: Path, file: Path, *more: str) -> Path:
    command(run, "--html", file, *more)
    return file


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    run = write_run(folder / "run", NEMOTRON, 1)
    plain = {"problem": "1 + 1 =", "response": "2", "reward": 1.0, "truncated": False, "weight_version": 4}
    for step in range(1, 51):
        write_samples(run, step, plain | {"prompt_id": step})
    hostile = {"problem": HOSTILE, "response": f"\x1b[2J{HOSTILE}\u202e", "reward": 0.0, "truncated": True}
    write_samples(run, 51, plain, hostile, *[plain] * 9)
    return _page(run, folder / "page.html")


def test_the_report_can_be_read_in_light_and_dark_at_a_desk_and_on_a_phone(browser: Page, page: Path) -> None:
    assert_readable(browser, page)


def test_responses_with_markup_and_terminal_codes_are_text_on_the_page(browser: Page, page: Path) -> None:
    browser.open(page)
    assert browser.evaluate("document.title") == "run: report"
    assert browser.evaluate("document.querySelectorAll('img').length") == 0 and browser.messages == []
    shown = browser.evaluate("[...document.querySelectorAll('details[open] pre')].map(e => e.textContent)")
    assert HOSTILE in shown and f"\ufffd[2J{HOSTILE}\ufffd" in shown
    assert "\x1b" not in page.read_text() and "\u202e" not in page.read_text()


def test_the_newest_step_is_open_and_40_of_51_steps_are_there(browser: Page, page: Path) -> None:
    browser.open(page)
    heads = browser.evaluate("[...document.querySelectorAll('details > summary')].map(e => e.innerText)")
    steps = [head for head in heads if head.startswith("step ")]
    assert len(steps) == 40 and steps[0].startswith("step 51: rewards 1, 0, 1") and steps[-1].startswith("step 1:")
    first = browser.evaluate("document.querySelector('details[open]').innerText")
    assert "and 3 more in" in first and "truncated" in first
    assert browser.evaluate("document.querySelectorAll('details[open]').length") == 1


def test_the_timeline_has_one_column_a_step_whose_parts_fill_it(browser: Page, page: Path) -> None:
    browser.open(page)
    parts = browser.evaluate(
        "[...document.querySelectorAll('figure.wide path.area')].map(p => p.getAttribute('d').split('Z').length - 1)"
    )
    # Nemotron logs exposed generation, log-probabilities and training; the rest is `other`.
    assert parts == [20] * 4
    data = browser.evaluate("JSON.parse(document.querySelector('figure.wide').dataset.points)")
    lines_of = {line["name"]: line["values"] for line in data["lines"]}
    total = metrics(NEMOTRON, 1)["timing/train/total_step_time"]
    assert lines_of["total"] == pytest.approx(total.tolist(), rel=1e-5)
    summed = np.sum([v for name, v in lines_of.items() if name != "total"], axis=0)
    # The made-up steps of this table are shorter than their phases at five steps; elsewhere the parts add up.
    assert np.isclose(summed, total, rtol=1e-4).sum() == 15 and np.all(summed > total * (1 - 1e-4))


def test_on_a_phone_a_timeline_of_its_own_stands_in_for_the_wide_one(browser: Page, page: Path) -> None:
    shown = "['wide', 'narrow'].map(k => getComputedStyle(document.querySelector('figure.' + k)).display)"
    browser.open(page, width=390)
    assert browser.evaluate(shown) == ["none", "block"]
    browser.open(page)
    assert browser.evaluate(shown) == ["block", "none"]


def test_10000_steps_are_at_most_240_columns_whose_means_are_those_of_all() -> None:
    steps = np.arange(1, 10_001)
    values = np.random.default_rng(0).uniform(1, 2, 10_000)
    text = charts.stacked("t", "s", steps, [("a", 1, values)], values)
    wide, narrow = text.split("<figure")[1:]
    assert wide.count("Z") == 240 and narrow.count("Z") == 113


def test_values_that_differ_in_the_sixth_digit_have_labels_that_fit() -> None:
    text = charts.curves("t", "", [("a", series([1, 2, 3], [1.00001, 1.00002, 1.00003]))], None)
    labels = [part.partition("<")[0] for part in text.split('text-anchor="end">')[1:]]
    assert labels and max(map(len, labels)) <= 7 and "1 + …" in text
    assert [float(label) for label in labels] == pytest.approx(
        [1e-5, 1.5e-5, 2e-5, 2.5e-5, 3e-5][:: 1 + (len(labels) < 4)], rel=0.06
    )


def test_the_eighth_run_has_a_line_that_is_drawn_and_dashed(tmp_path: Path) -> None:
    lines_of = [(str(i), series([1, 2], [i, i + 1.0])) for i in range(8)]
    text = charts.curves("t", "", lines_of, None)
    assert text.count("<polyline") == 8 and "--c7" not in text and text.count("stroke-dasharray") == 1


def test_a_run_that_is_not_there_is_a_user_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "none: no such file or folder" in capsys.readouterr().err


@pytest.mark.parametrize(("steps", "title"), [("2-20", "first 9"), ("1-20", "first 10"), ("2-12", "first 5")])
def test_columns_say_of_how_many_steps_the_ends_are(tmp_path: Path, steps: str, title: str) -> None:
    head = command(write_run(tmp_path / "run", SYNC, 0), "--steps", steps).splitlines()[3]
    assert title in head and title.replace("first", "last") in head
