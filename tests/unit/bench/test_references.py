"""Published results, and one's own against them: the Jupiter baseline's arithmetic, worked out by hand elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from nemo_rl_moe.bench.references.gap import compare, power_scales
from nemo_rl_moe.bench.references.table import flops_per_token, published, read_results, systems
from nemo_rl_moe.cli import main
from nemo_rl_moe.errors import UserError

BASELINE = Path("examples/bench/jupiter_qwen3_235b.yaml")
OVERLAPPED = "modelzoo-qwen3-235b-h100-bf16-overlap"


def changed(tmp_path: Path, *, drop: tuple[str, ...] = (), **values: object) -> Path:
    """The baseline's file with other values of its only result."""
    data = yaml.safe_load(BASELINE.read_text())
    data["results"][0].update(values)
    for key in drop:
        del data["results"][0][key]
    file = tmp_path / "ours.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


def gap(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main(["bench", "gap", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)[0]


def test_every_published_result_names_its_source_with_a_revision() -> None:
    results, sources = published()
    assert len(results) == 142
    assert all(sources[result.source].revision and sources[result.source].url for result in results.values())


def test_276_says_that_it_needs_the_overlap_and_238_and_233_that_their_batches_differ() -> None:
    results, _ = published()
    assert results[OVERLAPPED].a2a_overlap and "245 without" in results[OVERLAPPED].caveats[0]
    assert results["modelzoo-qwen3-235b-h100-bf16"].tflops == 245
    later, earlier = (results[f"bridge-{name}-qwen3-235b-h100-fp8"] for name in ("26.02.01", "25.11"))
    assert (later.tflops, later.global_batch) == (238, 8192)
    assert (earlier.tflops, earlier.global_batch) == (233, 2048)
    assert later.caveats and earlier.caveats


def test_the_baseline_is_27_7_to_28_5_seconds_a_step_and_8_6_to_8_8_percent_of_fp8(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = gap(capsys, str(BASELINE))
    assert [round(value, 1) for value in answer["step_seconds"]] == [27.7, 28.5]
    assert [round(value * 100, 1) for value in answer["mfu"]] == [8.6, 8.8]
    assert [item["tflops"] for item in answer["against"]][:3] == [320, 276, 276]


@pytest.mark.parametrize(
    ("reference", "linear", "cube_root"),
    [(OVERLAPPED, 209, 251), ("bridge-26.02.01-qwen3-235b-h100-fp8", 180, 217)],
)
def test_680_of_900_watts_is_a_bracket_from_linear_to_cube_root(
    reference: str, linear: int, cube_root: int, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = gap(capsys, str(BASELINE), "--against", reference)["against"][0]
    assert {name: round(value) for name, value in answer["at_our_power"].items()} == {
        "linear": linear,
        "cube root": cube_root,
    }


def test_a_measured_matrix_product_joins_the_bracket_and_an_uncapped_machine_has_none() -> None:
    assert power_scales(systems()["jupiter"], 0.85)["measured GEMM"] == 0.85
    assert power_scales(systems()["dgx-h100"], None) == {}
    with pytest.raises(UserError, match="--gemm-ratio 0"):
        power_scales(systems()["jupiter"], 0)


def test_what_differs_from_276_is_named_and_what_it_does_not_state_too() -> None:
    ours = read_results(BASELINE).results[0]
    item = compare(ours, published()[0][OVERLAPPED])
    text = "; ".join(item.differs)
    for part in ("precision bf16 there, fp8 here", "all-to-all overlap on there, off here", "TP2 PP8 VPP4 EP32 there"):
        assert part in text
    assert "batch" not in text
    assert item.unstated == ["CUDA graphs"]
    assert compare(ours, ours).differs == []


def test_expert_traffic_of_jupiter_at_ep_8_16_32_is_4_11_and_19_seconds_where_8_gpu_islands_take_0_2_and_6(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = gap(capsys, str(BASELINE), "--against", OVERLAPPED)["traffic"]
    found = {(row["system"], row["ep"]): row for row in rows}
    seconds = {key: round(row["network_seconds"], 1) for key, row in found.items()}
    assert [seconds["jupiter", ep] for ep in (4, 8, 16, 32)] == [0.0, 4.1, 11.2, 19.3]
    assert [seconds["dgx-h100", ep] for ep in (4, 8, 16, 32)] == [0.0, 0.0, 2.1, 5.6]
    assert [round(found["jupiter", ep]["remote_copies"], 2) for ep in (8, 16, 32)] == [1.00, 2.72, 4.67]
    assert round(found["jupiter", 16]["transfer_bytes"] / 1e6, 1) == 45.7


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layout": {"tp": 2, "pp": 8, "ep": 24}}, "EP 24 does not divide 128 experts; 16 or 32 does"),
        ({"layout": {"tp": 2, "pp": 7, "ep": 4}}, "TP 2 x PP 7 x CP 1 = 14; PP 4 or 8 would divide"),
        ({"global_batch": 2050}, "not a multiple of DP 16 x micro-batch 1; nearest: 2048 or 2064"),
        ({"model": "qwen3-235b-a22"}, "model whose FLOPs are counted, found qwen3-235b-a22"),
        ({"source": "nowhere"}, "none of the sources, expected one of report"),
        ({"system": "jupitr"}, "none of the systems, expected one of jupiter"),
        ({"gpus": None}, "gpus not stated"),
        ({"tflops": -1}, "tflops"),
        ({"sequence": 4000}, "no published result of Qwen/Qwen3-235B-A22B with sequences of 4000 tokens"),
    ],
)
def test_a_wrong_result_is_refused_with_the_rule_and_the_nearest_values(
    values: dict, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "gap", str(changed(tmp_path, **values))]) == 2
    assert message in capsys.readouterr().err


def test_a_result_without_source_is_refused_at_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gap", str(changed(tmp_path, drop=("source",)))]) == 2
    error = capsys.readouterr().err
    assert "ours.yaml:" in error and "results[0].source" in error and "missing" in error


def test_an_unknown_reference_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gap", str(BASELINE), "--against", OVERLAPPED + "ped"]) == 2
    assert f"did you mean {OVERLAPPED}" in capsys.readouterr().err


def test_gap_as_text_marks_our_row_and_states_the_caveats(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gap", str(BASELINE)]) == 0
    text = capsys.readouterr().out
    assert "jupiter        16        4            2.72           45.7            11.2" in text
    assert text.count("<- ours") == 1 and "245 without" in text and "680 of 900 W" in text


def test_references_are_filtered_and_an_unknown_filter_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "references", "--model", "Qwen/Qwen3-30B-A3B", "--system", "dgx-h100", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["model"] for row in rows} == {"qwen3-30b-a3b"} and max(row["tflops"] for row in rows) == 299.35
    assert all(row["source"]["url"] for row in rows)
    for options in (["--model", "qwen3-30b"], ["--system", "dgx"], ["--precision", "int4"], ["--file", "no.yaml"]):
        assert main(["bench", "references", *options]) == 2
    assert main(["bench", "references", "--system", "jupiter"]) == 2
    assert "no result has all" in capsys.readouterr().err


def test_a_file_of_ones_own_is_printed_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "references", "--file", str(BASELINE)]) == 0
    text = capsys.readouterr().out
    assert "170-175" in text and "wandb.ai/OpenEuroLLM" in text


def test_models_whose_config_is_not_public_are_listed_without_a_count() -> None:
    results, _ = published()
    uncounted = {result.model for result in results.values() if flops_per_token(result) is None}
    assert uncounted == {"nemotron-3-ultra", "nemotron-3.5-lightning", "qwen3-next-80b-a3b"}
