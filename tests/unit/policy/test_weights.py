"""The risk: a slice that lands in the wrong place under one parallel layout, and files that do not fit the model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nemo_rl_moe.errors import UserError
from nemo_rl_moe.policy.megatron import hf_files, weights
from nemo_rl_moe.policy.megatron.model_shape import read_hf_config
from tests.unit.policy import megatron_runs
from tests.unit.policy.ranks import Ranks
from tests.unit.policy.tiny_models import make_model, save_model

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
EP, ETP, SP = "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"
# 257 tokens do not divide by 2 or 4, and 4 tensor-parallel ranks are more than the 2 key/value heads.
DENSE = {
    "TP4": {TP: 4},
    "TP2 with SP, DP2": {TP: 2, SP: True},
    "TP2 PP2": {TP: 2, PP: 2},
    "DP4": {},
}
MOE = {
    "EP4": {EP: 4},
    "EP2 DP2": {EP: 2},
    "TP2 EP2": {TP: 2, EP: 2, SP: True},
    "TP2 EP4": {TP: 2, EP: 4, SP: True},
    "TP2 ETP2": {TP: 2, ETP: 2, SP: True},
    "TP2 ETP2 EP2": {TP: 2, ETP: 2, EP: 2, SP: True},
    "PP2 EP2, first stage with 1 of 3 layers": {PP: 2, EP: 2, "num_layers_in_first_pipeline_stage": 1},
    "PP2 TP2 EP2, last stage with 1 of 3 layers": {
        PP: 2,
        TP: 2,
        EP: 2,
        SP: True,
        "num_layers_in_last_pipeline_stage": 1,
    },
}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "dense": ("dense", {"vocab_size": 257}, DENSE),
    "dense tied": ("dense", {"vocab_size": 257, "tied": True}, DENSE),
    "moe": ("moe", {"num_hidden_layers": 3}, MOE),
    "moe tied": ("moe", {"num_hidden_layers": 3, "tied": True, "vocab_size": 254}, MOE),
}


def _save_with_logits(folder: Path, kind: str, **settings: Any) -> Path:
    theirs = save_model(folder, kind, **settings)
    with torch.no_grad():
        torch.save(theirs(megatron_runs.tokens_of(2, 24, theirs.config.vocab_size)).logits, folder / "logits.pt")
    return folder / "logits.pt"


@pytest.mark.parametrize("model", MODELS)
def test_four_ranks_write_the_same_bits_that_they_read(four_ranks: Ranks, tmp_path: Path, model: str) -> None:
    """And compute the same logits to 4e-6: the parts of a sum are added in another order."""
    kind, settings, layouts = MODELS[model]
    expected = _save_with_logits(tmp_path / "source", kind, **settings)
    for number, (name, megatron) in enumerate(layouts.items()):
        folder = tmp_path / str(number)
        found = four_ranks.call(megatron_runs.save_under, tmp_path / "source", folder, megatron, expected)
        assert found[0]["equal"], name
        # One writer for each element, and no memory that was never written.
        assert sum(rank["owned"] for rank in found) == found[0]["elements"], name
        assert all(rank["finite"] for rank in found), name
        assert max(rank.get("logits", 0.0) for rank in found) <= 4e-6, name


def test_four_copies_of_a_model_share_the_writing_to_within_5_percent(four_ranks: Ranks, tmp_path: Path) -> None:
    expected = _save_with_logits(tmp_path / "source", "moe")
    found = four_ranks.call(megatron_runs.save_under, tmp_path / "source", tmp_path / "saved", {}, expected)
    for rank in found:
        assert rank["owned"] == pytest.approx(found[0]["elements"] / 4, rel=0.05)


def test_a_checkpoint_of_many_files_is_read_by_transformers_bit_for_bit(one_rank: Ranks, tmp_path: Path) -> None:
    source, saved = tmp_path / "source", tmp_path / "saved"
    theirs = save_model(source, "moe")
    one_rank.call(_save_in_many_files, source, saved)
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 7
    assert index["metadata"]["total_size"] == sum(4 * p.numel() for p in theirs.parameters())
    ours = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter), name
    assert (saved / "config.json").read_text() == (source / "config.json").read_text()


def _save_in_many_files(join: megatron_runs.Join, source: Path, saved: Path) -> None:
    chunks, layout = megatron_runs.build(join, source)
    weights.save_hf(chunks, saved, layout, source, max_file_bytes=100_000)


def test_stacked_experts_load_the_same_bits_as_experts_one_by_one(one_rank: Ranks, tmp_path: Path) -> None:
    theirs = save_model(tmp_path / "single", "moe")
    shutil.copytree(tmp_path / "single", tmp_path / "stacked")
    stacked = {name: p.detach().contiguous() for name, p in theirs.named_parameters()}
    assert stacked["model.layers.1.mlp.experts.gate_up_proj"].shape == (8, 64, 64)
    save_file(stacked, tmp_path / "stacked" / "model.safetensors")
    assert one_rank.call(_load_both, tmp_path / "single", tmp_path / "stacked") == [True]


def _load_both(join: megatron_runs.Join, first: Path, second: Path) -> bool:
    chunks, layout = megatron_runs.build(join, first)
    before = megatron_runs.export(chunks, layout)
    with torch.no_grad():
        for parameter in chunks[0].parameters():
            parameter.zero_()
    weights.load_hf(chunks, second, layout)
    after = megatron_runs.export(chunks, layout)
    return all(torch.equal(before[name], after[name]) for name in before)


def test_names_and_shapes_are_those_of_the_checkpoint_in_its_order(tmp_path: Path) -> None:
    model = make_model("moe", num_hidden_layers=12, vocab_size=100)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    specs = weights.hf_tensor_specs(read_hf_config(tmp_path), torch.bfloat16)
    assert {name: shape for name, _, shape in specs} == {name: tuple(t.shape) for name, t in stored.items()}
    assert len(specs) == 12 * (9 + 3 * 8) + 3
    assert {dtype for _, dtype, _ in specs} == {torch.bfloat16}
    layers = [int(name.split(".")[2]) for name, _, _ in specs if ".layers." in name]
    assert layers == sorted(layers)


def test_missing_unexpected_and_misshapen_tensors_are_all_listed(one_rank: Ranks, tmp_path: Path) -> None:
    save_model(tmp_path, "moe")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.7.up_proj.weight"]
    tensors["model.layers.2.input_layernorm.weight"] = torch.ones(64)
    tensors["model.norm.weight"] = torch.ones(65)
    save_file(tensors, tmp_path / "model.safetensors")
    (message,) = one_rank.call(_load_error, tmp_path)
    assert "1 tensors missing: model.layers.1.mlp.experts.7.up_proj.weight" in message
    assert "1 tensors unexpected: model.layers.2.input_layernorm.weight" in message
    assert "1 tensors of the wrong shape: model.norm.weight is [65], expected [64]" in message


def _load_error(join: megatron_runs.Join, folder: Path) -> str:
    try:
        megatron_runs.build(join, folder)
    except UserError as error:
        return str(error)
    return "no error"


def test_a_tied_head_that_was_saved_all_the_same_is_ignored(one_rank: Ranks, tmp_path: Path) -> None:
    save_model(tmp_path, "dense", tied=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    assert one_rank.call(_load_error, tmp_path) == ["no error"]


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match=r"empty: no \*\.safetensors files"):
        hf_files.CheckpointReader(empty)
    with pytest.raises(UserError, match=r"nowhere: no such folder"):
        hf_files.model_folder(tmp_path / "nowhere")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "model.safetensors").write_bytes(b"\x00\xff" * 40)
    with pytest.raises(UserError, match=r"model\.safetensors: not a safetensors file"):
        hf_files.CheckpointReader(broken)
    (broken / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(UserError, match=r"names files that are not there: gone\.safetensors"):
        hf_files.CheckpointReader(broken)
    save_file({"a": torch.ones(3, dtype=torch.int64)}, empty / "model.safetensors")
    with pytest.raises(UserError, match=r"1 tensors of a format that cannot be trained, such as a \(I64\)"):
        hf_files.CheckpointReader(empty)
