"""The tiny model is a real checkpoint: transformers must read back exactly what a run will train."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.make_tiny_moe import STAMP, Settings, make, make_tokenizer, model_of, warmup_examples

REPOSITORY = Path(__file__).resolve().parents[3]
QUICK = Settings(warmup_steps=3, blur_steps=1, batch_size=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "tiny"
    assert make(out, QUICK)
    return out


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(QUICK)


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_the_checkpoint_is_a_qwen3_moe_of_8_experts_and_0_31_million_float32_parameters(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = model.config
    assert config.model_type == "qwen3_moe"
    assert (config.num_experts, config.num_experts_per_tok, config.vocab_size) == (8, 2, 512)
    assert not config.tie_word_embeddings
    assert config.hidden_size % 32 == 0
    assert config.moe_intermediate_size % 32 == 0
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert sum(p.numel() for p in model.parameters()) == 312_768


def test_the_file_holds_one_tensor_for_each_expert_under_its_hugging_face_name(folder: Path) -> None:
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
        shape = file.get_slice("model.layers.1.mlp.experts.7.gate_proj.weight").get_shape()
    assert shape == [64, 64]
    assert {f"model.layers.{i}.mlp.experts.{e}.down_proj.weight" for i in range(2) for e in range(8)} <= names
    assert "model.layers.0.mlp.gate.weight" in names
    assert "lm_head.weight" in names


def test_prompts_have_24_tokens_and_every_digit_is_a_token(tokenizer: Any) -> None:
    examples = warmup_examples(QUICK, tokenizer)
    assert len(examples) == 200
    assert {len(prompt) for prompt, _ in examples} == {24}
    assert tokenizer.convert_ids_to_tokens(tokenizer("1234567890", add_special_tokens=False)["input_ids"]) == list(
        "1234567890"
    )
    assert {answer[-1] for _, answer in examples} == {tokenizer.eos_token_id}
    assert (len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id) == (512, 0, 1)


@pytest.mark.parametrize("task", ["chain_sum", "basic_arithmetic", "word_sorting"])
def test_decoding_gives_every_text_back(tokenizer: Any, task: str) -> None:
    for row in reasoning_gym.create_dataset(task, size=50, seed=3):
        ids = tokenizer(row["question"], add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == row["question"]
    assert tokenizer.decode(tokenizer("naïve 你好")["input_ids"]) == "naïve 你好"


def test_the_loaded_tokenizer_and_generation_config_stop_at_im_end(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_second_call_changes_nothing_and_other_settings_make_the_model_anew(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    assert make(out, QUICK)
    before = digests(out)
    assert not make(out, QUICK)
    assert digests(out) == before
    assert make(out, Settings(warmup_steps=0, blur_steps=0))
    assert digests(out)[STAMP] != before[STAMP]
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_the_same_settings_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    make(tmp_path / "again", QUICK)
    assert digests(tmp_path / "again") == digests(folder)


def test_an_interrupted_call_leaves_neither_a_model_nor_a_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tools.make_tiny_moe.warm_up", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "model", QUICK)
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_says_that_the_model_is_there(tmp_path: Path) -> None:
    command = [sys.executable, "tools/make_tiny_moe.py", "--out", str(tmp_path / "m"), "--warmup-steps", "0"]
    first = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=True)
    second = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=True)
    assert "made in" in first.stdout
    assert second.stdout == f"{tmp_path / 'm'}: already there with these settings\n"


def test_the_dense_model_is_a_qwen3_of_0_16_million_parameters(tmp_path: Path) -> None:
    assert make(tmp_path / "dense", replace(QUICK, num_experts=0, num_experts_per_tok=0))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert model.config.model_type == "qwen3"
    # Both vocabulary matrices, and two layers of attention 24,576 + feed-forward 24,576 + norms 192, and the last norm.
    assert sum(p.numel() for p in model.parameters()) == 2 * 512 * 64 + 2 * (24_576 + 24_576 + 192) + 64
    with safe_open(tmp_path / "dense/model.safetensors", "pt") as file:
        assert "model.layers.1.mlp.gate_proj.weight" in set(file.keys())


@pytest.mark.parametrize(
    ("recipe", "model"),
    [
        ("grpo-tiny-moe-cpu-ep2", "models/tiny-moe-cpu"),
        ("grpo-tiny-dense-cpu", "models/tiny-dense-cpu"),
        ("performance/grpo-qwen3-30ba3b-4n4g", None),
        ("no-such-recipe", None),
    ],
)
def test_the_model_of_a_recipe_is_known(recipe: str, model: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    found = model_of(Path(f"examples/configs/recipes/llm/{recipe}.yaml"))
    assert found == (Path(model) if model else None)
