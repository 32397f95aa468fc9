"""The risk: a model that is a little wrong (a swapped half, a shifted slice, a lost norm) still trains, only worse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.policy import megatron_runs
from tests.unit.policy.ranks import Ranks
from tests.unit.policy.tiny_models import save_model

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("dense", {}, {}),
    "dense tied": ("dense", {"tied": True}, {}),
    "moe alltoall": ("moe", {}, {"moe_token_dispatcher_type": "alltoall"}),
    "moe allgather": ("moe", {}, {"moe_token_dispatcher_type": "allgather"}),
    "moe tied alltoall": ("moe", {"tied": True}, {"moe_token_dispatcher_type": "alltoall"}),
    "moe tied allgather": ("moe", {"tied": True}, {"moe_token_dispatcher_type": "allgather"}),
    "moe, experts' weights not normalised": ("moe", {"norm_topk_prob": False}, {}),
    "moe, every second layer dense": ("moe", {"num_hidden_layers": 3, "decoder_sparse_step": 2}, {}),
    "moe, layer 0 dense": ("moe", {"mlp_only_layers": [0]}, {}),
    "moe, activations recomputed": ("moe", {}, {"activation_checkpointing": True}),
    "dense, one key/value head, rope base 10000": (
        "dense",
        {"num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_match_transformers_to_2e_6_and_gradients_to_1e_6(one_rank: Ranks, tmp_path: Path, case: str) -> None:
    kind, settings, megatron = CASES[case]
    (found,) = one_rank.call(megatron_runs.compare_with_transformers, tmp_path, kind, settings, megatron)
    assert found["logits"] <= 2e-6
    assert found["gradients"] <= 1e-6
    # The bounds mean something only where the numbers themselves are large.
    assert found["logit_size"] > 1.5
    assert found["gradient_size"] > 0.03
    assert found["names"]
    assert found["weights_equal"]


def test_packed_masked_and_padded_logits_match_one_sequence_alone_to_1e_5(one_rank: Ranks, tmp_path: Path) -> None:
    """The row of 760 tokens is three times longer than the model's longest sequence of 256."""
    save_model(tmp_path, "moe")
    (found,) = one_rank.call(megatron_runs.lay_out_in_four_ways, tmp_path, [1, 250, 7, 64, 256, 2, 180])
    assert set(found) == {"packed", "masked", "right_padded", "left_padded", "pad_id"}
    assert max(found.values()) <= 1e-5
    # Which token fills the pads must not show in a single bit.
    assert found["pad_id"] == 0.0


def test_a_frozen_router_takes_no_gradient_and_everything_else_does(one_rank: Ranks, tmp_path: Path) -> None:
    save_model(tmp_path, "moe")
    ((frozen, trained),) = one_rank.call(_frozen_and_trained, tmp_path)
    assert frozen == ["decoder.layers.0.mlp.router.weight", "decoder.layers.1.mlp.router.weight"]
    assert trained == 2 * (6 + 2 * 8) + 3


def _frozen_and_trained(join: megatron_runs.Join, folder: Path) -> tuple[list[str], int]:
    gpt = megatron_runs.build(join, folder, freeze_moe_router=True)[0][0]
    tokens = megatron_runs.tokens_of(1, 64)
    gpt(tokens, megatron_runs.positions_of(tokens), None).sum().backward()
    frozen = [name for name, p in gpt.named_parameters() if not p.requires_grad]
    return frozen, sum(p.grad is not None for p in gpt.parameters())
