"""What the user sees: one line a step that fits, a split that adds up, plain lines where there is no terminal."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from nemo_rl_moe.recipe.load import LoadedRecipe
from nemo_rl_moe.tracking.console import RunConsole, number, step_split
from nemo_rl_moe.tracking.header import header_lines

STEP = {
    "train/reward": 0.4375,
    "train/loss": -0.0123,
    "train/grad_norm": 1.2,
    "train/gen_kl_error": 3.1e-7,
    "performance/total_num_tokens": 24_000.0,
    "timing/train/total_step_time": 8.0,
    "timing/train/generation": 4.0,
    "timing/train/exposed_generation": 4.0,
    "timing/train/policy_and_reference_logprobs": 1.0,
    "timing/train/policy_training": 2.0,
    "timing/train/weight_sync": 0.5,
    "timing/train/reward": 0.25,
}


class FakeTerminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def shown(steps: list[tuple[int, dict]], *, terminal: bool = False, width: int = 120, code: int = 0) -> str:
    stream = FakeTerminal() if terminal else io.StringIO()
    console = RunConsole(20, stream, width)
    console.header([("recipe", "a.yaml")])
    for step, metrics in steps:
        console.step(step, metrics)
    console.finish(code, "runs/a")
    return stream.getvalue()


@pytest.fixture
def colour_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_the_plain_line_of_a_step_has_every_number_and_a_split_that_adds_up_to_8_seconds() -> None:
    assert shown([(3, STEP)]).splitlines()[2] == (
        "step 3/20  reward 0.438  loss -0.0123  grad_norm 1.2  gen_kl_error 3.1e-07  tokens/s 3000  "
        "time 8.00 s (generation 4.00, logprob 1.00, train 2.00, refit 0.50, other 0.50)"
    )


def test_plain_output_has_no_escape_codes_and_no_wrapped_lines() -> None:
    text = shown([(step, STEP) for step in range(1, 21)], width=60)
    assert "\x1b" not in text and "\r" not in text
    assert sum(line.startswith("step ") for line in text.splitlines()) == 20


def test_the_split_counts_only_generation_that_the_step_waited_for() -> None:
    ahead = STEP | {"timing/train/generation": 7.0, "timing/train/exposed_generation": 1.0}
    split = step_split(ahead)
    assert split == {"generation": 1.0, "logprob": 1.0, "train": 2.0, "refit": 0.5, "other": 3.5}
    assert sum(split.values()) == 8.0


@pytest.mark.usefixtures("colour_terminal")
def test_on_a_terminal_a_row_of_a_step_fits_in_100_cells_with_a_bar_of_24() -> None:
    text = shown([(3, STEP)], terminal=True, width=100)
    row = next(line for line in text.splitlines() if "0.438" in line)
    plain = Text.from_ansi(row[row.rfind("\x1b[2K") + 4 :] if "\x1b[2K" in row else row)
    assert plain.plain.count("█") == 24
    assert plain.cell_len <= 100
    cells = [span.end - span.start for span in plain.spans]
    # 24 cells for 4, 1, 2, 0.5 and 0.5 of 8 seconds; the cut at 22.5 rounds to 22.
    assert cells == [12, 3, 6, 1, 2]


@pytest.mark.usefixtures("colour_terminal")
def test_titles_come_again_after_40_rows() -> None:
    text = shown([(step, STEP) for step in range(1, 82)], terminal=True)
    assert text.count("grad norm") == 3


def test_a_validation_has_a_line_of_its_own() -> None:
    text = shown([(5, STEP | {"validation/accuracy": 0.625, "validation/num_samples": 64.0})])
    assert "validation at step 5: accuracy 0.625 (64 samples)" in text.splitlines()


def test_the_last_lines_compare_the_first_10_steps_with_the_last_10() -> None:
    steps = [(step, STEP | {"train/reward": 0.1 if step <= 10 else 0.9}) for step in range(1, 21)]
    last = shown(steps).splitlines()[-2]
    assert last.startswith("done: step 20 of 20 after ")
    assert last.endswith("mean reward 0.100 in the first 10 steps, 0.900 in the last 10")


def test_a_run_that_failed_says_its_exit_code_and_one_without_steps_says_nothing() -> None:
    assert "ended with exit code 1: step 3 of 20" in shown([(3, STEP)], code=1)
    assert shown([], code=1).splitlines() == ["recipe  a.yaml", ""]


def test_a_step_with_missing_or_nan_metrics_is_shown_all_the_same() -> None:
    line = shown([(1, {"train/reward": 0.0, "train/loss": math.nan})]).splitlines()[2]
    assert line.startswith("step 1/20  reward 0  loss nan  grad_norm -  gen_kl_error -  tokens/s -  time nan s")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (3.14159e-7, "3.1e-07"), (0.012345, "0.01235"), (1234.5, "1234"), (2e6, "2.0e+06"), (None, "-")],
)
def test_numbers_of_six_sizes_stay_readable(value: float | None, text: str) -> None:
    assert number(value) == text


def test_a_closed_pipe_ends_the_output_and_not_the_run() -> None:
    class FakeClosedPipe(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    console = RunConsole(20, FakeClosedPipe())
    console.header([("recipe", "a.yaml")])
    console.step(1, STEP)
    console.event("warning: x")
    console.finish(0, "runs/a")


def test_the_header_says_model_devices_layout_and_batch(load: Callable[..., LoadedRecipe], tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(
        '{"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}'
    )
    loaded = load(
        f"policy.model_name={model}",
        "cluster.gpus_per_node=2",
        "policy.megatron_cfg.expert_model_parallel_size=2",
    )
    lines = dict(header_lines(loaded, tmp_path / "run"))
    assert lines["model"] == f"{model} (qwen3_moe, 2 layers, 8 experts, top 2, float32)"
    assert lines["devices"] == "2 CPU devices of 1 core; trainer and generator take turns on them"
    assert lines["trainer"] == "megatron-core, 2 ranks (EP 2, DP 2)"
    assert lines["generator"] == "vLLM, 2 engines, up to 16 new tokens"
    assert lines["batch"] == "4 prompts x 2 responses a step, 1 update of 8 samples"


def test_rich_renders_the_live_line_with_step_phase_and_time_left() -> None:
    console = RunConsole(20, FakeTerminal(), 100)
    console._status.step, console._status.seconds = 5, [2.0, 2.0]
    console.phase("policy_training")
    screen = Console(file=io.StringIO(), width=100)
    screen.print(console._status)
    text = screen.file.getvalue()
    assert "step 5/20" in text and "about 0:30 left" in text and "policy training" in text
