"""The page of a comparison in a real browser: its numbers, its curves, and that people can read it anywhere."""

from __future__ import annotations

import contextlib
import io
import math
from pathlib import Path

import numpy as np
import pytest

from nemo_rl_moe.cli import main
from nemo_rl_moe.compare.page.charts import curves, thin, ticks
from nemo_rl_moe.compare.run_data import series
from tests.chromium import Page
from tests.unit.compare.looks import assert_readable
from tests.unit.compare.published import NEMOTRON, SYNC, metrics, write_run

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    for arm, name in enumerate(("base", "hybridep")):
        write_run(folder / name, NEMOTRON, arm)
    return write(folder / "page.html", folder / "base", folder / "hybridep", "--steps", "2-20")


def write(file: Path, *arguments: str | Path) -> Path:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        assert main(["compare", *map(str, arguments), "--html", str(file)]) == 0
    assert said.getvalue() == f"wrote {file}\n"
    return file


def test_a_page_can_be_read_in_light_and_dark_at_a_desk_and_on_a_phone(browser: Page, page: Path) -> None:
    assert_readable(browser, page)


def test_the_page_shows_both_readings_of_the_rate_and_the_verdict(browser: Page, page: Path) -> None:
    browser.open(page)
    text = browser.evaluate("document.body.innerText")
    assert browser.evaluate("document.querySelector('.badge').innerText") == "matched"
    rows = browser.evaluate(
        "[...document.querySelectorAll('.stack tr')].map(r => r.innerText.split(/\\s*[\\t\\n]\\s*/))"
    )
    found = {row[0]: row for row in rows}
    assert "+16.4 %" in found["end to end, mean of rates"] and "+5.4 %" in found["end to end, whole window"]
    assert "11.0 points apart" in text and "19 observations" in text


def test_each_logged_metric_has_a_curve_of_both_runs_and_each_averaged_one_a_distribution(
    browser: Page, page: Path
) -> None:
    browser.open(page)
    curves, spreads = browser.evaluate(
        "[...document.querySelectorAll('.charts')].map(c => [...c.querySelectorAll('figure')].map("
        "f => f.querySelectorAll('polyline').length))"
    )
    # Nemotron: 4 times, 3 rates, reward, KL, tokens per sample; validation is one dot a run.
    assert curves == [2] * 10 + [0] and spreads == [2] * 10


def test_pointing_at_a_curve_reads_the_values_of_the_nearest_step(browser: Page, page: Path) -> None:
    browser.open(page)
    x, y = browser.evaluate(
        "(() => { const f = [...document.querySelectorAll('figure[data-points]')].find("
        "f => f.innerText.startsWith('policy training, step time')); f.scrollIntoView({block: 'center'});"
        "const b = f.querySelector('svg').getBoundingClientRect(), d = JSON.parse(f.dataset.points);"
        "return [b.left + d.x[d.steps.indexOf(11)] * b.width / d.width + 1, b.top + b.height / 2]; })()"
    )
    browser.point_at(x, y)
    step, *lines = browser.evaluate("document.getElementById('tip').innerText").splitlines()
    assert step == "step 11"
    shown = {name: float(value) for name, value in (line.split("  ") for line in lines)}
    expected = [metrics(NEMOTRON, arm)["timing/train/policy_training"][10] for arm in (0, 1)]
    assert list(shown) == ["base", "hybridep"]
    assert list(shown.values()) == pytest.approx(expected, rel=1e-4)
    assert browser.evaluate("getComputedStyle(document.getElementById('tip')).display") == "block"


def test_a_blocked_run_has_its_cause_and_its_curves_but_no_numbers(browser: Page, tmp_path: Path) -> None:
    write_run(tmp_path / "base", SYNC, 0)
    write_run(tmp_path / "run", SYNC, 1, steps=12, exit_code=1, reason="CUDA out of memory")
    file = write(tmp_path / "page.html", tmp_path / "base", tmp_path / "run")
    assert_readable(browser, file)
    assert "ended at step 12 of 20 (out of memory)" in browser.evaluate("document.querySelector('.box').innerText")
    assert browser.evaluate("document.querySelectorAll('.stack, .tile').length") == 0
    assert browser.evaluate("document.querySelectorAll('.charts figure').length") > 8


def test_a_name_with_markup_is_text_on_the_page(browser: Page, tmp_path: Path) -> None:
    write_run(tmp_path / "base", SYNC, 0)
    write_run(tmp_path / HOSTILE, SYNC, 1)
    file = write(tmp_path / "page.html", tmp_path / "base", tmp_path / HOSTILE)
    browser.open(file)
    assert browser.messages == [] and browser.evaluate("document.querySelectorAll('img').length") == 0
    assert browser.evaluate("document.querySelector('h1').innerText") == f"base → {HOSTILE}"


def test_three_runs_share_one_page_with_a_table_each_and_curves_together(browser: Page, tmp_path: Path) -> None:
    for name, arm in (("base", 0), ("first", 1), ("second", 0)):
        write_run(tmp_path / name, SYNC, arm)
    file = write(tmp_path / "page.html", *(tmp_path / name for name in ("base", "first", "second")))
    assert_readable(browser, file)
    assert browser.evaluate("document.querySelectorAll('.stack').length") == 2
    assert browser.evaluate("document.querySelector('.charts figure').querySelectorAll('polyline').length") == 3


def test_a_page_that_cannot_be_written_is_a_user_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arm, name in enumerate(("base", "run")):
        write_run(tmp_path / name, SYNC, arm)
    code = main(["compare", str(tmp_path / "base"), str(tmp_path / "run"), "--html", str(tmp_path / "no/page.html")])
    assert code == 2 and "cannot write (No such file or directory)" in capsys.readouterr().err


def test_thinning_10000_points_keeps_400_at_most_and_the_one_spike() -> None:
    values = [1.0] * 10_000
    values[7777] = 50.0
    kept = thin(series(list(range(10_000)), values))
    assert len(kept.steps) <= 400 and kept.values.max() == 50.0 and 7777 in kept.steps


def test_thinning_keeps_the_one_value_of_10000_that_was_not_finite_and_the_line_is_broken_there() -> None:
    kept = thin(series(list(range(10_000)), [math.nan if step == 7777 else float(step) for step in range(10_000)]))
    assert len(kept.steps) == 401 and kept.steps[np.isnan(kept.values)].tolist() == [7777]
    # Without it: the two ends of each stretch of 50.
    assert kept.steps[:4].tolist() == [0, 49, 50, 99] and kept.steps[-1] == 9999
    assert curves("x", "", [("run", kept)], None).count("<polyline") == 2


def test_ticks_are_round_numbers_inside_the_range() -> None:
    assert ticks(0.93, 2.11) == pytest.approx([1.0, 1.5, 2.0])
    assert ticks(0, 100) == [0, 50, 100]
    assert ticks(-3, 3) == [-2, 0, 2]
    assert ticks(0.14, 0.95) == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert ticks(1, 80, least=6) == [10, 20, 30, 40, 50, 60, 70, 80]
