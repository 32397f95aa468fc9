"""A comparison of unlike things is worse than none: both sides must do the same work, and the sums must be right."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_rl_moe.recipe.load import load_recipe
from tools.bench import our_side, report, workloads
from tools.bench.our_recipe import plain_recipe
from tools.bench.report import Row
from tools.bench.verifier import text_parity
from tools.bench.workloads import END, Workload

VARIED = dataclasses.replace(
    workloads.FIXED, name="varied-tiny", end_probability=1 / 16, min_response_tokens=8, max_new_tokens=64
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


def response_lengths(folder: Path, workload: Workload, repeats: int) -> list[int]:
    """Lengths of transformers' own samples: plain softmax at temperature 1."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = [json.loads(line)["problem"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    torch.manual_seed(0)
    inputs = tokenizer(rows[:8], return_tensors="pt")
    out = model.generate(
        **inputs, do_sample=True, top_k=0, max_new_tokens=workload.max_new_tokens, num_return_sequences=repeats
    )
    responses = out[:, inputs["input_ids"].shape[1] :].tolist()
    return [row.index(END) + 1 if END in row else len(row) for row in responses]


def test_512_prompts_have_exactly_64_tokens_as_text_and_as_chat(root: Path) -> None:
    folder = workloads.make(workloads.FIXED, root)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = [json.loads(line)["problem"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    plain = tokenizer(rows)["input_ids"]
    assert [len(ids) for ids in plain] == [64] * 512
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": rows[0]}], add_generation_prompt=True, tokenize=False
    )
    assert tokenizer(chat, add_special_tokens=False)["input_ids"] == plain[0]


def test_the_fixed_model_has_0_31_million_parameters_and_never_ends_before_32_tokens(root: Path) -> None:
    folder = workloads.make(workloads.FIXED, root)
    assert workloads.parameters(folder) == 312_768
    assert response_lengths(folder, workloads.FIXED, 16) == [32] * 128


def test_256_varied_responses_have_8_to_64_tokens_and_the_mean_of_a_cut_geometric_distribution(root: Path) -> None:
    folder = workloads.make(VARIED, root)
    lengths = response_lengths(folder, VARIED, 32)
    assert (min(lengths), max(lengths)) == (8, 64)
    # The mean of 7 + G cut at 64, with G geometric of chance 1/16: 7 + (1 - (15/16)^57) * 16.
    expected = 7 + (1 - (15 / 16) ** 57) * 16
    assert statistics.mean(lengths) == pytest.approx(expected, abs=3.5)


def test_a_second_call_with_the_same_settings_makes_nothing(root: Path) -> None:
    first = (workloads.make(workloads.FIXED, root) / "model/model.safetensors").stat().st_mtime_ns
    assert (workloads.make(workloads.FIXED, root) / "model/model.safetensors").stat().st_mtime_ns == first


def test_the_written_recipe_is_valid_and_asks_for_64_samples_and_one_optimizer_step(root: Path) -> None:
    folder = workloads.make(workloads.FIXED, root)
    path = root / "fixed-0.3M.yaml"
    path.write_text(yaml.safe_dump(plain_recipe(folder, workloads.FIXED, threads=2, steps=5)))
    recipe = load_recipe(path).recipe
    assert recipe.grpo.num_prompts_per_step * recipe.grpo.num_generations_per_prompt == 64
    assert recipe.policy.train_global_batch_size == 64
    assert recipe.loss_fn.reference_policy_kl_penalty == 0.04
    assert recipe.cluster.cpus_per_device == 2


def test_the_reward_of_a_text_of_4_characters_is_1_and_of_5_is_0() -> None:
    assert [text_parity("w1 w", {}), text_parity("w1 w2", {})] == [1.0, 0.0]


def test_a_step_of_10_s_with_9_5_s_of_core_work_has_a_share_of_5_percent_after_2_warm_up_steps(tmp_path: Path) -> None:
    names = ("generation", "policy_and_reference_logprobs", "policy_training", "weight_sync")
    seconds = dict(zip(names, (4.0, 2.0, 3.0, 0.5), strict=True)) | {"total_step_time": 10.0, "reward": 0.4}
    row = {f"timing/train/{name}": value for name, value in seconds.items()}
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": step, "train/loss": 1.0, **row}) + "\n" for step in (1, 2, 3, 4)))
    steps = our_side.read_steps(file, warmup=2)
    assert len(steps) == 2
    assert our_side.share_of_other(steps) == pytest.approx([0.05, 0.05])


def test_a_written_response_of_3_words_has_4_tokens_unless_it_was_cut(tmp_path: Path) -> None:
    for step, truncated in ((1, False), (2, False), (10, True)):
        row = {"response": "w1 w2 w3", "truncated": truncated}
        (tmp_path / f"step_{step}.jsonl").write_text(json.dumps(row) + "\n")
    assert our_side.read_response_lengths(tmp_path, warmup=1) == [4, 3]


def test_a_ratio_of_0_96_meets_0_95_and_a_share_of_0_06_misses_0_05() -> None:
    speed = Row("speed", "1 s", "1 s", ratio=0.96, goal=0.95, at_least=True, load=0.0)
    share = Row("share", "6 %", "", ratio=0.06, goal=0.05, at_least=False, load=0.0)
    assert (speed.met, share.met) == (True, False)
    table = report.markdown([speed, share], ["a note"])
    assert "| speed | 1 s | 1 s | 0.96 | ≥ 0.95, met | 0.0 |" in table
    assert "| share | 6 % |  | 0.06 | ≤ 0.05, **not met** | 0.0 |" in table


def test_the_spread_of_1_2_and_6_seconds_is_median_2_between_1_and_6() -> None:
    assert report.spread([6.0, 1.0, 2.0], "s", 1) == "2.0 s (1.0-6.0)"


def test_writing_twice_replaces_the_table_between_the_marks_and_keeps_the_rest(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    marked = "# Head\n<!-- measured a: begin -->\n{}\n<!-- measured a: end -->\ntail\n"
    page.write_text(marked.format("old"))
    for text in ("first", "second"):
        report.write_into(page, "a", text)
    assert page.read_text() == marked.format("second")
    with pytest.raises(ValueError, match="has no <!-- measured b: begin -->"):
        report.write_into(page, "b", "third")
