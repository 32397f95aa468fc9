"""The risk: a model or a layout that is accepted and then computes something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.errors import UserError
from nemo_rl_moe.policy.megatron.model import check_layout, padded_vocab_size
from nemo_rl_moe.policy.megatron.model_shape import ModelShape, read_hf_config
from nemo_rl_moe.policy.megatron.parallel import ParallelLayout
from nemo_rl_moe.recipe.schema.policy import MegatronConfig
from tests.unit.policy.tiny_models import make_model

# The published config.json of Qwen3-30B-A3B, without what concerns generation.
QWEN3_30B_A3B: dict[str, Any] = {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def read(folder: Path, **changes: Any) -> ModelShape:
    (folder / "config.json").write_text(json.dumps({**QWEN3_30B_A3B, **changes}))
    return read_hf_config(folder)


def test_a_published_config_and_one_of_transformers_5_are_both_read(tmp_path: Path) -> None:
    shape = read(tmp_path)
    assert (shape.num_layers, shape.num_experts, shape.experts_per_token) == (48, 128, 8)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.rope_theta) == (32, 4, 128, 1e6)
    assert shape.moe_layers == (True,) * 48
    make_model("moe").config.save_pretrained(tmp_path)
    assert (read_hf_config(tmp_path).num_experts, read_hf_config(tmp_path).rope_theta) == (8, 1e6)
    assert read_hf_config(tmp_path, {"num_experts_per_tok": 4}).experts_per_token == 4


def test_layers_with_experts_follow_decoder_sparse_step_and_mlp_only_layers(tmp_path: Path) -> None:
    shape = read(tmp_path, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert shape.moe_layers == (False, True, False, False, False, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not supported; known are qwen3 .*, qwen3_moe"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; expected 'silu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn' is not supported"),
        ({"num_experts": None}, "num_experts is None, expected a positive integer"),
        ({"rope_theta": "1e6"}, "rope_theta is '1e6', expected a positive number"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok is 129, expected at most num_experts, 128"),
        ({"num_experts_per_tok": 1}, "norm_topk_prob with one expert a token is not supported"),
        ({"num_key_value_heads": 5}, "num_key_value_heads is 5, expected a divisor of num_attention_heads, 32"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized checkpoints are not supported"),
    ],
)
def test_a_config_that_would_be_computed_wrongly_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=rf"config\.json: {message}"):
        read(tmp_path, **changes)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tensor_model_parallel_size": 3}, "tensor_model_parallel_size: 3, expected a divisor of the model's 32"),
        ({"pipeline_model_parallel_size": 5}, "5 stages cannot share 48 layers"),
        (
            {"pipeline_model_parallel_size": 4, "num_layers_in_first_pipeline_stage": 11},
            r"4 stages cannot share 48 layers \(first stage 11, last stage even\)",
        ),
        ({"expert_model_parallel_size": 3}, "expert_model_parallel_size: 3, expected a divisor of the model's 128"),
        ({"expert_tensor_parallel_size": 5}, "expert_tensor_parallel_size: 5, expected a divisor of the model's 768"),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, "trains the experts wrongly"),
        ({"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}, "sequence_parallel: false"),
    ],
)
def test_a_layout_that_does_not_fit_qwen3_30b_is_refused(tmp_path: Path, layout: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_layout(read(tmp_path), MegatronConfig(**layout))


def test_layouts_of_the_cluster_recipes_fit_qwen3_30b(tmp_path: Path) -> None:
    shape = read(tmp_path)
    for tp, pp, ep, first in ((1, 1, 16, None), (4, 1, 8, None), (2, 4, 8, None), (8, 1, 8, None), (1, 4, 8, 9)):
        check_layout(
            shape,
            MegatronConfig(
                tensor_model_parallel_size=tp,
                pipeline_model_parallel_size=pp,
                expert_model_parallel_size=ep,
                sequence_parallel=tp > 1,
                num_layers_in_first_pipeline_stage=first,
            ),
        )


def test_a_vocabulary_of_257_is_padded_to_258_rows_under_tp2(tmp_path: Path) -> None:
    shape = read(tmp_path, vocab_size=257)
    assert padded_vocab_size(shape, ParallelLayout(tp_size=2)) == 258
    assert padded_vocab_size(shape, ParallelLayout()) == 257
