"""Conversions between speeds, the table of peaks, and every published row against the count."""

from __future__ import annotations

import json

import pytest

from nemo_rl_moe.bench.flops.convert import convert
from nemo_rl_moe.bench.flops.peaks import PEAKS, peak_tflops
from nemo_rl_moe.bench.references.table import Result, flops_per_token, published
from nemo_rl_moe.cli import main
from nemo_rl_moe.errors import UserError

STEP = 2048 * 4096
RESULTS = published()[0]
WITH_TOKENS = [result for result in RESULTS.values() if result.tokens_per_second and flops_per_token(result)]
WITH_SECONDS = [result for result in RESULTS.values() if result.step_seconds and flops_per_token(result)]
# 26.08 prints tokens/s in multiples of 1024, and 39 x 1024 may be 1.3 % off; every other row is within 1 %.
COARSE = "bridge-26.08-nemotron3-nano-gb300-mxfp8"


def test_116_published_rates_and_7_step_times_can_be_checked() -> None:
    assert (len(WITH_TOKENS), len(WITH_SECONDS)) == (116, 7)


@pytest.mark.parametrize("result", WITH_TOKENS, ids=lambda result: result.id)
def test_a_published_rate_in_tokens_gives_its_published_tflops_within_1_percent(result: Result) -> None:
    speed = convert(flops_per_token(result) or 0, tokens_per_second=result.tokens_per_second)
    assert speed.tflops == pytest.approx(result.tflops, rel=0.013 if result.id == COARSE else 0.01)


@pytest.mark.parametrize("result", WITH_SECONDS, ids=lambda result: result.id)
def test_a_published_step_time_gives_its_published_tflops_within_1_percent(result: Result) -> None:
    assert result.global_batch and result.sequence
    speed = convert(
        flops_per_token(result) or 0,
        step_seconds=result.step_seconds,
        tokens_per_step=result.global_batch * result.sequence,
        gpus=result.gpus,
    )
    assert speed.tflops == pytest.approx(result.tflops, rel=0.01)


@pytest.mark.parametrize(
    ("tflops", "seconds", "tokens", "percent"),
    [(320, 15.2, 2162, 32.3), (276, 17.6, 1864, 27.9), (238, 20.4, 1608, 24.1), (170, 28.5, 1148, 17.2)],
)
def test_the_jupiter_arithmetic_for_256_gpus_and_2048_sequences(
    tflops: float, seconds: float, tokens: int, percent: float
) -> None:
    speed = convert(148.0348e9, tflops=tflops, tokens_per_step=STEP, gpus=256, peak=989.4)
    assert speed.step_seconds is not None and speed.mfu is not None
    assert (round(speed.step_seconds, 1), round(speed.tokens_per_second)) == (seconds, tokens)
    assert round(speed.mfu * 100, 1) == percent


def test_every_way_to_say_a_speed_converts_back_to_itself() -> None:
    flops, common = 23.006e9, {"tokens_per_step": 4e6, "gpus": 16, "peak": 989.4}
    speed = convert(flops, tflops=300, **common)
    for name in ("tokens_per_second", "step_seconds", "mfu"):
        again = convert(flops, **{name: getattr(speed, name)}, **common)
        assert again.tflops == pytest.approx(300, rel=1e-12)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "expected one speed"),
        ({"tflops": 1, "mfu": 0.1}, "expected one speed"),
        ({"tflops": 0}, "above 0"),
        ({"tflops": float("nan")}, "above 0"),
        ({"step_seconds": 1}, "need the global batch"),
        ({"mfu": 0.3}, "needs the GPU"),
    ],
)
def test_a_conversion_without_what_it_needs_is_refused(given: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        convert(1e9, **given)


def test_hopper_has_989_bf16_and_1979_fp8_and_every_peak_has_a_source() -> None:
    assert {round(peak_tflops(gpu, "bf16")) for gpu in ("h100", "h200", "gh200")} == {989}
    assert {round(peak_tflops(gpu, "mxfp8" if "b" in gpu else "fp8")) for gpu in ("gh200", "gb200")} == {1979, 5000}
    assert all(peak.source for peak in PEAKS.values())


@pytest.mark.parametrize(
    ("gpu", "precision", "message"),
    [
        ("gh20", "bf16", "did you mean gh200"),
        ("h100", "fp16", "precision 'fp16' is not known: .*bf16"),
        ("h100", "nvfp4", "precision of h100 'nvfp4' is not known: .*bf16, fp8"),
    ],
)
def test_an_unknown_gpu_or_format_is_refused_with_what_there_is(gpu: str, precision: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        peak_tflops(gpu, precision)


def test_the_command_prints_one_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "flops", "--model", "qwen3-235b-a22b", "--seq", "4096", "--json", "--step-seconds", "17.6"]
    assert main([*arguments, "--gpus", "256", "--global-batch", "2048", "--gpu", "h100"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert round(answer["gflop_per_token"], 3) == 148.035
    assert sum(term["share"] for term in answer["terms"]) == pytest.approx(1)
    assert round(answer["speed"]["tflops"]) == 276 and round(answer["speed"]["mfu"], 3) == 0.279


def test_the_command_counts_lengths_each_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    def gflop(*options: str) -> float:
        assert main(["bench", "flops", "--model", "qwen3-30b-a3b", "--json", *options]) == 0
        return json.loads(capsys.readouterr().out)["gflop_per_token"]

    packed, short, long = gflop("--lengths", "1024,3072"), gflop("--seq", "1024"), gflop("--seq", "3072")
    assert packed == pytest.approx(short / 4 + long * 3 / 4)
    assert packed < gflop("--seq", "4096")


@pytest.mark.parametrize(
    "options",
    [
        ["--seq", "0"],
        ["--lengths", "12,x"],
        ["--lengths", "12,-1"],
        ["--gpus", "0"],
        ["--mtp", "-1"],
        ["--mfu", "30"],
        ["--step-seconds", "3"],
        ["--tflops", "-3"],
    ],
)
def test_wrong_options_exit_with_2(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "flops", "--model", "qwen3-30b-a3b", *options]) == 2
    assert capsys.readouterr().err
