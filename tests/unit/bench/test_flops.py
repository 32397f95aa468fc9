"""The FLOPs count against published counts of the two models that published results are for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_rl_moe.bench.flops.count import DecoderShape, shape_of, training_flops, training_flops_per_token

QWEN3_235B = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
}
QWEN3_30B = QWEN3_235B | {
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
}
TINY = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "hidden_size": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 3,
    "intermediate_size": 5,
    "moe_intermediate_size": 7,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 11,
}


@pytest.mark.parametrize(
    ("config", "length", "gflop"),
    [
        (QWEN3_30B, 4096, 23.006),
        (QWEN3_30B, 8192, 27.84),
        (QWEN3_30B, 16384, 37.50),
        (QWEN3_235B, 4096, 148.035),
        (QWEN3_235B, 8192, 166.96),
        (QWEN3_235B, 16384, 204.81),
        (QWEN3_235B, 131072, 734.70),
    ],
)
def test_gflop_a_token_equals_the_published_count_to_its_last_digit(config: dict, length: int, gflop: float) -> None:
    digits = len(str(gflop).partition(".")[2])
    assert round(training_flops_per_token(DecoderShape.from_hf(config), length) / 1e9, digits) == gflop


def test_a_published_step_of_17_6_seconds_on_256_gpus_is_276_tflops_a_gpu() -> None:
    flops = training_flops(DecoderShape.from_hf(QWEN3_235B), [4096] * 2048)
    assert round(flops / 17.6 / 256 / 1e12) == 276


def test_two_tokens_of_a_tiny_moe_counted_by_hand_are_6576_flops() -> None:
    # Per layer and token: query, key, value 4x(6+3+3), output 6x4, two experts 2x3x4x7; head 4x11. Multiply-adds.
    per_token = 2 * (4 * 12 + 24 + 2 * 3 * 4 * 7) + 44
    # Causal: 2 tokens attend to 2^2 / 2 = 2 pairs; scores and values, 6 channels each, 2 layers.
    pairs = 2 * 2 * 6 * 2
    assert training_flops(DecoderShape.from_hf(TINY), [2]) == 3 * 2 * (2 * per_token + pairs) == 6576


def test_packing_changes_nothing_as_each_sequence_attends_to_itself() -> None:
    shape = DecoderShape.from_hf(TINY)
    assert training_flops(shape, [3, 5]) == training_flops(shape, [3]) + training_flops(shape, [5])
    assert training_flops(shape, [3, 5]) < training_flops(shape, [8])


def test_layer_2_of_3_listed_as_dense_counts_its_own_width() -> None:
    dense = {"num_hidden_layers": 3, "mlp_only_layers": [1]}
    shape = DecoderShape.from_hf(TINY | dense)
    assert (shape.num_dense_layers, shape.num_moe_layers, shape.dense_ffn_size) == (1, 2, 5)


def test_a_dense_model_has_no_experts() -> None:
    config = {key: value for key, value in TINY.items() if "expert" not in key and "moe_i" not in key}
    shape = DecoderShape.from_hf(config)
    assert (shape.num_dense_layers, shape.num_moe_layers, shape.experts_per_token) == (2, 0, 0)


def test_the_shape_of_a_folder_is_read_with_overrides_and_unknown_families_have_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    shape = shape_of(str(tmp_path), {"num_hidden_layers": 1})
    assert shape is not None and shape.num_moe_layers == 1
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"model_type": "deepseek_v3"}))
    assert shape_of(str(tmp_path)) is None
    assert shape_of(str(tmp_path / "nowhere")) is None
