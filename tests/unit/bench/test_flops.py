"""The FLOPs count against published counts, and against closed forms worked out by hand for each family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_rl_moe.bench.flops.count import UnknownFamily, model_flops, training_flops, training_flops_per_token
from nemo_rl_moe.bench.flops.models import count_model, find_model, recipe_flops
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.published_models import PUBLISHED
from nemo_rl_moe.recipe.schema import PolicyConfig

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
    assert round(training_flops_per_token(model_flops(config), length) / 1e9, digits) == gflop


def test_a_published_step_of_17_6_seconds_on_256_gpus_is_276_tflops_a_gpu() -> None:
    flops = training_flops(model_flops(QWEN3_235B), [4096] * 2048)
    assert round(flops / 17.6 / 256 / 1e12) == 276


def test_two_tokens_of_a_tiny_moe_counted_by_hand_are_6576_flops() -> None:
    # Per layer and token: query, key, value 4x(6+3+3), output 6x4, two experts 2x3x4x7; head 4x11. Multiply-adds.
    per_token = 2 * (4 * 12 + 24 + 2 * 3 * 4 * 7) + 44
    # Causal: 2 tokens attend to 2^2 / 2 = 2 pairs; scores and values, 6 channels each, 2 layers.
    pairs = 2 * 2 * 6 * 2
    assert training_flops(model_flops(TINY), [2]) == 3 * 2 * (2 * per_token + pairs) == 6576


def test_packing_changes_nothing_as_each_sequence_attends_to_itself() -> None:
    shape = model_flops(TINY)
    assert training_flops(shape, [3, 5]) == training_flops(shape, [3]) + training_flops(shape, [5])
    assert training_flops(shape, [3, 5]) < training_flops(shape, [8])


def per_token(config: dict, name: str, mtp_layers: int = 0) -> float:
    return next((term.per_token for term in model_flops(config, mtp_layers).terms if term.name == name), 0.0)


def test_layer_2_of_3_listed_as_dense_counts_its_own_width() -> None:
    config = TINY | {"num_hidden_layers": 3, "mlp_only_layers": [1]}
    assert per_token(config, "dense layers") == 3 * 4 * 5
    assert per_token(config, "routed experts") == 2 * (3 * 4 * 2 * 7)


def test_a_dense_model_has_no_experts() -> None:
    config = {key: value for key, value in TINY.items() if "expert" not in key and "moe_i" not in key}
    assert per_token(config | {"model_type": "qwen3"}, "routed experts") == 0
    assert per_token(config | {"model_type": "qwen3"}, "dense layers") == 2 * 3 * 4 * 5


def test_llama_8b_is_six_times_its_matrices_and_its_attention() -> None:
    # 32 layers of 4096: query and output 4096 x 4096, key and value 4096 x 1024, three of 4096 x 14336; head 128256.
    matrices = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256
    count = model_flops(PUBLISHED["meta-llama/Llama-3.1-8B-Instruct"])
    assert training_flops_per_token(count, 8192) == 6 * (matrices + 32 * 4096 * 8192)


def test_deepseek_v3_with_latent_attention_and_one_prediction_layer_follows_the_closed_form() -> None:
    # arXiv:2412.19437, section 4.2: 61 layers, the first 3 dense; queries through 1536, keys and values through 512.
    hidden, heads, key, value = 7168, 128, 128 + 64, 128
    attention = 1536 * (hidden + heads * key) + 512 * (hidden + heads * (128 + value)) + hidden * 64
    attention += heads * value * hidden
    experts, dense = 3 * hidden * 2048 * 9, 3 * hidden * 18432
    matrices = 62 * attention + 3 * dense + 59 * experts + 2 * hidden * 129280 + 2 * hidden**2 + 3 * hidden
    pairs = 62 * heads * (key + value) * 4096 / 2
    count = model_flops(PUBLISHED["deepseek-ai/DeepSeek-V3"], 1)
    assert training_flops_per_token(count, 4096) == pytest.approx(6 * (matrices + pairs), rel=1e-12)


def test_nemotron_super_follows_the_closed_form_of_its_40_mamba_40_expert_and_8_attention_layers() -> None:
    h = 4096
    mamba = h * (2 * 8192 + 2 * 8 * 128 + 128) + 8192 * h + 7 / 2 * 8192 * 128
    experts = 2 * 1024 * 22 * 2688 + 2 * h * 1024 + 2 * h * 5376
    attention = 2 * h * (4096 + 256) + h * 8192
    whole = 40 * mamba + 40 * experts + 8 * attention + h * 131072
    count = model_flops(PUBLISHED["nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16"])
    assert training_flops_per_token(count, 8192) == pytest.approx(6 * whole, rel=1e-12)


def test_mamba_of_nemotron_nano_is_counted_as_published_results_do_and_the_note_says_so() -> None:
    count = model_flops(PUBLISHED["nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"])
    assert "5376" in count.notes[0] and "4096" in count.notes[0]


@pytest.mark.parametrize("name", ["qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B", "QWEN3-235B-A22B"])
def test_a_published_model_is_found_by_its_name_in_any_case(name: str) -> None:
    assert find_model(name)[0] == "Qwen/Qwen3-235B-A22B"


def test_an_unknown_model_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(UserError, match=r"--model qwen3-235b: .*did you mean qwen3-235b-a22b"):
        find_model("qwen3-235b")
    with pytest.raises(UserError, match=r"published ones: .*deepseek-v3"):
        find_model("zzz")


def test_folder_and_file_give_the_same_count_and_an_unknown_family_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    counts = [count_model(str(path))[2] for path in (tmp_path, tmp_path / "config.json")]
    assert counts[0] == counts[1] == model_flops(TINY)
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"model_type": "mixtral"}))
    with pytest.raises(UserError, match="model_type 'mixtral' is not counted, only deepseek_v3"):
        count_model(str(tmp_path))
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(UserError, match="expected a JSON object"):
        count_model(str(tmp_path))


def test_a_missing_size_is_named() -> None:
    with pytest.raises(UnknownFamily, match="hidden_size"):
        model_flops({key: value for key, value in TINY.items() if key != "hidden_size"})


def test_a_recipe_counts_its_model_with_overrides_and_prediction_layers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    policy = {"model_name": str(tmp_path), "generation": {}, "hf_config_overrides": {"num_hidden_layers": 1}}
    one = recipe_flops(PolicyConfig.model_validate(policy))
    assert one == model_flops(TINY | {"num_hidden_layers": 1})
    more = PolicyConfig.model_validate(policy | {"megatron_cfg": {"mtp_num_layers": 1}})
    assert recipe_flops(more) == model_flops(TINY | {"num_hidden_layers": 1}, 1)
    hub = PolicyConfig.model_validate(policy | {"model_name": "some/hub-id"})
    assert recipe_flops(hub) is None
    assert recipe_flops(hub, tmp_path) == one
