"""Files that a crash, a full disk, another program or bad will has written: told in words, and never averaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.cli import main
from nemo_rl_moe.compare import as_json, tables
from nemo_rl_moe.compare.comparison import Pair, compare
from nemo_rl_moe.compare.one_run import report
from nemo_rl_moe.compare.page import compare_page, report_page
from nemo_rl_moe.compare.read import read_run
from nemo_rl_moe.compare.run_data import MAX_STEP, RunData
from nemo_rl_moe.compare.window import Window
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.printable import printable
from tests.unit.compare.published import SYNC, rows, write_run

# 500 kB of brackets: deeper than any parser goes.
DEEP = "[" * 250_000 + "]" * 250_000
LINES = [json.dumps(row) for row in rows(SYNC, 1)]


def with_lines(folder: Path, lines: list[str], **manifest: Any) -> RunData:
    run = write_run(folder / "run", SYNC, 1, **manifest)
    (run / "metrics.jsonl").write_bytes("\n".join(lines).encode() + b"\n")
    return read_run(run)


def against_base(folder: Path, run: RunData) -> Pair:
    (pair,) = compare(read_run(write_run(folder / "base", SYNC, 0)), [run], window=Window(2, 20))
    return pair


@pytest.mark.parametrize(
    ("line", "flaw"),
    [
        (LINES[6][:40], "not JSON"),
        ("\x00" * 64, "not JSON"),
        (DEEP, "not JSON"),
        ("[7]", "expected an object"),
        ('{"train/reward": 1}', "expected an integer `step`, got None"),
        ('{"step": true}', "expected an integer `step`, got True"),
        ('{"step": 7.0}', "expected an integer `step`, got 7.0"),
        ('{"step": -7}', "step -7 is not from 0 to"),
        (f'{{"step": {MAX_STEP + 1}, "train/reward": 1}}', f"step {MAX_STEP + 1} is not from 0 to"),
    ],
)
def test_a_broken_line_is_left_out_and_named_and_its_step_is_missing(tmp_path: Path, line: str, flaw: str) -> None:
    pair = against_base(tmp_path, with_lines(tmp_path, [*LINES[:6], line, *LINES[7:]]))
    said, missing = pair.run.problems
    assert said.startswith("metrics.jsonl: line 7 left out, no row of metrics (metrics.jsonl:7: ") and flaw in said
    assert missing == "18 of 19 steps logged; missing 7" and pair.blocked and pair.lines == []


def test_a_last_line_that_is_still_being_written_is_no_flaw(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", SYNC, 1)
    (run / "metrics.jsonl").write_text("\n".join(LINES[:19]) + "\n" + LINES[19][:50])
    read = read_run(run)
    assert read.training_steps[-1] == 19 and list(read.flaws) == []


def test_a_last_line_that_lacks_only_its_line_break_counts(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", SYNC, 1)
    (run / "metrics.jsonl").write_text("\n".join(LINES))
    assert read_run(run).training_steps[-1] == 20


def test_of_a_step_logged_twice_the_later_row_counts_and_a_note_says_which(tmp_path: Path) -> None:
    row = json.loads(LINES[9])
    again = [json.dumps(row | {"train/reward": 0.75}), json.dumps(row | {"step": 11, "train/reward": 0.5})]
    pair = against_base(tmp_path, with_lines(tmp_path, [*LINES, *again]))
    assert pair.run.run.series["train/reward"].values[[9, 10]].tolist() == [0.75, 0.5]
    assert [w for w in pair.warnings if w.startswith("run: step 10-11 logged more than once")]
    assert not pair.blocked


def test_a_validation_in_a_row_of_its_own_is_no_repetition(tmp_path: Path) -> None:
    run = with_lines(tmp_path, [*LINES, json.dumps({"step": 20, "validation/accuracy": 0.5})])
    assert list(run.notes) == [] and run.series["validation/accuracy"].values.tolist() == [0.5]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "null", "1" + "0" * 400])
def test_a_value_that_is_not_finite_takes_the_mean_of_its_metric_only(tmp_path: Path, value: str) -> None:
    row = json.loads(LINES[6])
    row.pop("train/reward")
    torn = json.dumps(row)[:-1] + f', "train/reward": {value}}}'
    pair = against_base(tmp_path, with_lines(tmp_path, [*LINES[:6], torn, *LINES[7:]]))
    lines = {line.row.key: line for line in pair.lines if line.kind == "mean"}
    assert lines["reward"].run is None and lines["reward"].note == "run: not finite at step 7"
    assert lines["gen_kl_error"].change is not None
    assert pair.run.problems == ["train/reward is not finite at step 7"]


def test_values_that_are_no_numbers_are_no_values(tmp_path: Path) -> None:
    row = json.loads(LINES[6]) | {"train/reward": {"a": 1}, "train/gen_kl_error": [1, 2], "x": "<b>"}
    run = with_lines(tmp_path, [*LINES[:6], json.dumps(row), *LINES[7:]])
    assert 7 not in run.series["train/reward"].steps and 7 in run.series["timing/train/total_step_time"].steps
    assert "x" not in run.series


def test_a_run_that_died_before_its_first_step_is_blocked_with_its_cause(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run", SYNC, 1, exit_code=1, reason="ValueError: No available memory for the cache blocks"
    )
    (run / "metrics.jsonl").write_text("")
    expected = "ended at step 0 of 20 (out of memory): ValueError: No available memory for the cache blocks"
    pair = against_base(tmp_path, read_run(run))
    assert pair.run.problems == [expected, "0 of 19 steps logged; missing 2-20"]
    (run / "metrics.jsonl").unlink()
    assert against_base(tmp_path / "again", read_run(run)).run.problems == pair.run.problems


def test_two_runs_that_died_before_their_first_step_are_told_apart_by_cause_and_not_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, reason in (("a", "CUDA out of memory"), ("b", "PhaseTimeout: setup: no answer from rank 0")):
        write_run(tmp_path / name, SYNC, 0, steps=0, exit_code=1, reason=reason)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    text = capsys.readouterr().out
    assert "a: ended at step 0 of 20 (out of memory)" in text and "b: ended at step 0 of 20 (time-out)" in text
    assert "steps 2-20, by logged step number: not compared" in text


def test_one_step_far_away_does_not_ask_for_an_array_of_every_step_between(tmp_path: Path) -> None:
    run = with_lines(tmp_path, [*LINES, json.dumps({"step": MAX_STEP, "train/reward": 1.0})])
    with pytest.raises(UserError, match="steps 2-1000000000: expected at most 10000000 steps; name a window"):
        compare(run, [run])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", b"\xff\xfe\x00{"),
        ("a.json", DEEP.encode()),
        ("a.json", b'[{"_step": NaN, "train/loss": 1}]'),
        ("a.json", b'[{"_step": "three", "train/loss": 1}]'),
        ("a.json", b'[{"_step": [1], "train/loss": 1}]'),
        ("a.json", b'[{"_step": ' + b"9" * 400 + b', "train/loss": 1}]'),
        ("a.json", b'[{"_step": -1, "train/loss": 1}]'),
        ("a.json", b'{"train/loss": {"1": ' + b"9" * 400 + b"}}"),
        ("a.json", b'{"train/loss": {"' + b"9" * 30 + b'": 1}}'),
        ("a.csv", b"_step,train/loss\n1,\xff\n"),
        ("a.csv", b"_step,train/loss\n1,2,3\n"),
        ("a.wandb", b":W&B\xe1\xbe\x00" + bytes(range(1, 256)) * 40),
        ("a.json", b'[{"_step": "\\u001b[31mred\\u202e", "train/loss": 1}]'),
    ],
)
def test_a_file_of_another_making_is_one_line_that_names_it(
    tmp_path: Path, name: str, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    write_run(tmp_path / "base", SYNC, 0)
    assert main(["compare", str(tmp_path / "base"), str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert str(tmp_path / name) in said and len(said.splitlines()) == 1 and "Traceback" not in said
    assert "\x1b" not in said and "\u202e" not in said


@pytest.mark.parametrize(
    "manifest",
    [
        {"versions": [1], "host": "h", "devices": {"gpus_of_this_host": {"a": 1}}, "git": 3},
        {"devices": {"gpus_of_this_host": ["H200", None]}, "exit_code": "1", "reason": {"a": [1]}},
    ],
)
def test_a_manifest_of_other_shapes_is_read_as_far_as_it_goes(tmp_path: Path, manifest: dict[str, Any]) -> None:
    run = read_run(write_run(tmp_path / "run", SYNC, 1, **manifest))
    assert run.environment is not None and len(run.training_steps) == 20


@pytest.mark.parametrize("grpo", [[1], "x", {"max_num_steps": True}, {"max_num_steps": -3}, {"max_num_steps": 10**12}])
def test_a_configuration_of_another_shape_plans_no_steps(tmp_path: Path, grpo: Any) -> None:
    run = write_run(tmp_path / "run", SYNC, 1)
    (run / "config.yaml").write_text(json.dumps({"grpo": grpo, "cluster": [2]}))
    pair = against_base(tmp_path, read_run(run))
    assert pair.run.run.ending.planned_steps is None and pair.lines


def test_json_of_an_infinite_setting_is_json_that_others_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, arm in (("base", 0), ("run", 1)):
        write_run(tmp_path / name, SYNC, arm)
    with (tmp_path / "run/config.yaml").open("a") as file:
        file.write("limit: .inf\nother: .nan\n")
    assert main(["compare", str(tmp_path / "base"), str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    values = {d["key"]: d["run"] for d in found["pairs"][0]["config_differences"]}
    assert (values["limit"], values["other"]) == ("inf", "nan")


def test_commands_to_a_terminal_in_a_reason_and_in_a_name_are_not_passed_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "base", SYNC, 0)
    write_run(tmp_path / "\x1b]0;title\x07run", SYNC, 1, steps=9, exit_code=1, reason="\x1b[2Jgone\u202eabc")
    paths = [str(tmp_path / "base"), str(tmp_path / "\x1b]0;title\x07run")]
    for more in ([], ["--markdown"]):
        assert main(["compare", *paths, *more]) == 0
        text = capsys.readouterr().out
        assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text and "[2Jgone" in text


def test_half_a_character_and_control_characters_become_the_replacement_character() -> None:
    assert printable("a\ud800b\x00c\nd\te") == "a\ufffdb\ufffdc\nd\te"
    assert printable("é 漢 🙂") == "é 漢 🙂"


@pytest.mark.parametrize(
    ("change", "text"),
    [(16.4, "+16.4 %"), (-99.96, "-100.0 %"), (899.9, "+899.9 %"), (900.0, "x 10"), (4.413093784727e12, "x 4.41e+10")],
)
def test_from_ten_times_the_baseline_on_a_change_is_a_factor(change: float, text: str) -> None:
    assert tables.change_text(change, percent=True) == text
    assert tables.change_text(1000.0, percent=False) == "+1000.00000"


def test_one_change_of_a_billion_times_leaves_the_table_narrow_and_the_other_bars_to_be_read(tmp_path: Path) -> None:
    small = [json.dumps(json.loads(line) | {"train/gen_kl_error": 1e-13}) for line in LINES]
    base = with_lines(tmp_path / "0", small)
    (pair,) = compare(base, [with_lines(tmp_path / "1", LINES)])
    rows = {row.label: row for section in tables.sections(pair) for row in section.rows}
    assert rows["gen_kl_error (nat)"].change == "x 1.89e+10"
    assert rows["gen_kl_error (nat)"].interval.startswith("x 1.8")
    assert max(len(row.interval) for row in rows.values()) < 30
    assert max(compare_page._reach(line) for line in pair.lines) <= 100


@pytest.mark.parametrize(
    ("steps", "code", "said"),
    [
        ("21-30", 0, "0 of 10 steps logged; missing 21-30"),
        ("0-0", 2, "expected A-B"),
        ("20-2", 2, "expected A-B"),
        ("5-5", 0, "1 observation of each metric"),
        ("2-99999999", 2, "at most 10000000 steps"),
    ],
)
def test_odd_windows_are_told_in_words(
    tmp_path: Path, steps: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for arm, name in enumerate(("base", "run")):
        write_run(tmp_path / name, SYNC, arm)
    assert main(["compare", str(tmp_path / "base"), str(tmp_path / "run"), "--steps", steps]) == code
    captured = capsys.readouterr()
    assert said in captured.out + captured.err and "Traceback" not in captured.err


def test_a_run_against_itself_shows_no_difference_anywhere(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", SYNC, 0))
    (pair,) = compare(run, [run])
    assert {line.change for line in pair.lines} == {0.0}
    assert {line.shown for line in pair.lines} <= {"no difference shown", "no interval"}
    assert pair.accuracies[0].change == 0 and pair.accuracies[0].interval.spans_zero  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("accuracy", "samples", "note"),
    [
        (54.3, 256, "no share from 0 to 1: no interval"),
        (-0.5, 64, "no share from 0 to 1: no interval"),
        (0.5, 1e300, "the number of samples is not known: no interval"),
        (0.123, 15, "partial scores: no binomial interval"),
    ],
)
def test_an_accuracy_that_is_no_share_of_samples_has_no_interval(
    tmp_path: Path, accuracy: float, samples: float, note: str
) -> None:
    row = json.loads(LINES[19]) | {"validation/accuracy": accuracy, "validation/num_samples": samples}
    run = with_lines(tmp_path, [*LINES[:19], json.dumps(row)])
    (found,) = against_base(tmp_path, run).accuracies
    assert (found.run, found.interval, found.note) == (accuracy, None, note)
    assert report(run).validations[0].interval is None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [1e308, 5e-324, -1.0, 0.0])
def test_numbers_at_the_ends_of_what_a_float_holds_are_compared_without_a_word_from_numpy(
    tmp_path: Path, value: float
) -> None:
    run = with_lines(tmp_path, [json.dumps(dict.fromkeys(row, value) | {"step": row["step"]}) for row in rows(SYNC, 1)])
    pair = against_base(tmp_path, run)
    assert {line.row.key for line in pair.lines} >= {"step_time.e2e", "throughput.e2e", "reward"}
    json.loads(as_json.text(as_json.document([pair])), parse_constant=pytest.fail)
    assert compare_page.document([pair]) and report_page.document(report(run))


def test_what_is_neither_a_file_nor_a_folder_and_a_link_to_itself_are_user_errors(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path / "loop", Path("/dev/zero")):
        with pytest.raises(UserError, match="neither a file nor a folder"):
            read_run(path)
    with pytest.raises(UserError, match="File name too long"):
        read_run(tmp_path / ("x" * 300))


def test_an_empty_configuration_is_none(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", SYNC, 1)
    (run / "config.yaml").write_text("")
    assert against_base(tmp_path, read_run(run)).differences.verdict == "not known to be matched"
