"""A published report on eight runs comes out of their run directories number by number."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

from nemo_rl_moe.cli import main
from nemo_rl_moe.compare.comparison import Line, Pair, compare_pair
from nemo_rl_moe.compare.read import read_run
from nemo_rl_moe.compare.tables import sections
from nemo_rl_moe.compare.window import Window
from tests.unit.compare.published import (
    FIRST,
    LAST,
    NEMOTRON,
    PHASES,
    PRINTED,
    QWEN_235B,
    WORKLOADS,
    write_run,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """<root>/<number of the workload>/{base,hybridep}."""
    folder = tmp_path_factory.mktemp("published")
    for number, workload in enumerate(WORKLOADS):
        for arm, name in enumerate(("base", "hybridep")):
            write_run(folder / str(number) / name, workload, arm)
    return folder


def pair(root: Path, workload: str, first: int = FIRST, last: int = LAST) -> Pair:
    folder = root / str(list(WORKLOADS).index(workload))
    return compare_pair(read_run(folder / "base"), read_run(folder / "hybridep"), Window(first, last))


def line(found: Pair, key: str, kind: str) -> Line:
    return next(each for each in found.lines if (each.row.key, each.kind) == (key, kind))


def command(*arguments: str | Path) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["compare", *map(str, arguments)]) == 0
    return out.getvalue()


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_printed_change_is_reproduced_to_a_tenth_of_a_point(root: Path, workload: str) -> None:
    found = pair(root, workload)
    ours = {}
    for key, short, _, _ in PHASES:
        ours[f"{short}_s"] = line(found, f"step_time.{key}", "mean").change
        ours[f"{short}_tok"] = line(found, f"throughput.{key}", "mean of rates").change
    assert {name: round(change, 1) for name, change in ours.items()} == PRINTED[workload]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_printed_mean_is_reproduced_digit_for_digit(root: Path, workload: str) -> None:
    table = WORKLOADS[workload]
    rows = {row.label: row for section in sections(pair(root, workload)) for row in section.rows}
    names = {"e2e": "end to end", "policy_training": "policy training", "logprob": "log-probabilities"}
    for key, label in names.items():
        assert [rows[label].base, rows[label].run] == [f"{v:.2f}" for v in table["step_time_s"][key]]
        rates = rows[f"{label}, mean of rates"]
        assert [rates.base, rates.run] == [f"{v:.2f}" for v in table["tokens_per_sec_per_gpu"][key]]
    assert [rows["mean reward"].base, rows["mean reward"].run] == [f"{v:.5f}" for v in table["reward"]]
    kl = rows["gen_kl_error (nat)"]
    assert [float(kl.base), float(kl.run)] == table["gen_kl_error"]
    accuracy = rows["step 20"]
    assert [accuracy.base[:7], accuracy.run[:7]] == [f"{100 * v:.2f} %" for v in table["validation_accuracy"]]


def test_nemotron_gains_16_4_percent_as_mean_of_rates_and_5_4_over_the_window_and_a_note_says_so(root: Path) -> None:
    found = pair(root, NEMOTRON)
    rates, whole = line(found, "throughput.e2e", "mean of rates"), line(found, "throughput.e2e", "whole window")
    assert (round(rates.base, 2), round(rates.run, 2), round(rates.change, 1)) == (142.91, 166.35, 16.4)
    assert (round(whole.base, 2), round(whole.run, 2), round(whole.change, 1)) == (111.91, 117.98, 5.4)
    assert [w for w in found.warnings if "+16.4 % as a mean of per-step rates, +5.4 % over the whole window" in w]


def test_the_other_three_workloads_have_no_note_on_their_rates(root: Path) -> None:
    for workload in set(WORKLOADS) - {NEMOTRON}:
        assert pair(root, workload).warnings == []


def test_nemotrons_longer_samples_are_a_warning(root: Path) -> None:
    (warning,) = [w for w in pair(root, NEMOTRON).warnings if w.startswith("tokens per sample differ")]
    assert "2902 → 3021 (+4.1 %)" in warning


def test_a_drop_of_6_67_points_is_said_to_be_1_sample_of_15_and_no_difference(root: Path) -> None:
    (found,) = pair(root, QWEN_235B).accuracies
    assert round(100 * found.change, 2) == -6.67
    assert found.note == "6.67 points are 1 sample of 15"
    assert found.interval is not None and found.interval.spans_zero


def test_no_published_drop_in_accuracy_is_shown_by_its_samples(root: Path) -> None:
    for workload in WORKLOADS:
        (found,) = pair(root, workload).accuracies
        assert found.change < 0 and found.interval is not None and found.interval.spans_zero


def test_steps_2_to_20_are_19_observations_and_1_to_19_give_another_mean(root: Path) -> None:
    found = pair(root, NEMOTRON)
    assert len(found.window) == 19
    shifted = pair(root, NEMOTRON, 1, 19)
    mean = line(found, "step_time.e2e", "mean").base
    # The warm-up step is ten times as slow, so a window that slips by one cannot go unseen.
    assert line(shifted, "step_time.e2e", "mean").base > 1.1 * mean


def test_the_table_says_the_window_the_observations_and_that_the_pair_is_matched(root: Path) -> None:
    text = command(root / "2/base", root / "2/hybridep", "--steps", "2-20")
    assert text.splitlines()[0] == "base → hybridep: matched: differs in dispatcher only (3 keys)"
    assert "steps 2-20, by logged step number: 19 observations of each metric; all metrics finite" in text
    base = [found.end() for e in text.splitlines() if (found := re.match(r"  [a-z -]+(, [a-z ]+)? +\d+\.\d\d(?= )", e))]
    assert len(base) == 10 and len(set(base)) == 1
    assert re.search(r"end to end, whole window +111\.91 +117\.98 +\+5\.4 %", text)


def test_markdown_has_the_same_numbers_in_tables_that_a_pull_request_shows(root: Path) -> None:
    text = command(root / "2/base", root / "2/hybridep", "--steps", "2-20", "--markdown")
    assert text.startswith("## base → hybridep: matched")
    assert "| end to end, mean of rates | 142.91 → 166.35 | +16.4 % |" in text
    widths = {row.count("|") for row in text.splitlines() if row.startswith("| end to end")}
    assert widths == {6}


def test_json_has_every_number_and_nothing_else_on_stdout(root: Path) -> None:
    (found,) = json.loads(command(root / "3/base", root / "3/hybridep", "--steps", "2-20", "--json"))["pairs"]
    assert (found["steps"], found["observations"], found["verdict"]) == ([2, 20], 19, "matched")
    rows = {(row["key"], row["kind"]): row for row in found["metrics"]}
    assert round(rows["step_time.policy_training", "mean"]["change"], 1) == -18.9
    assert found["accuracy"][0]["samples"] == [15, 15]
    assert {d["kind"] for d in found["config_differences"]} == {"treatment", "logging"}
