"""Risk: memory planned for weights, gradients or optimizer state that Megatron holds otherwise.

What `recipe/memory` predicts is compared with what megatron-core allocates on every rank of four.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_moe.policy.megatron import optimizer
from nemo_rl_moe.recipe.memory.parameters import model_parameters
from nemo_rl_moe.recipe.memory.trainer import rank_parameters, state_bytes
from nemo_rl_moe.recipe.schema import PolicyConfig, Recipe
from tests.unit.policy import megatron_runs
from tests.unit.policy.local_workers import make_recipe
from tests.unit.policy.ranks import Ranks
from tests.unit.policy.tiny_models import make_model, recipe_policy, save_model

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
PLAIN = {"optimizer": {"use_distributed_optimizer": False}}
LAYOUTS = {
    "moe-dp4": ("moe", {}),
    "moe-ep4": ("moe", {"expert_model_parallel_size": 4}),
    "moe-tp2-ep2": ("moe", TP2 | EP2),
    "moe-tp2-etp2": ("moe", TP2 | {"expert_tensor_parallel_size": 2}),
    "moe-pp2-ep2": ("moe", PP2 | EP2),
    "moe-frozen-router": ("moe", EP2 | {"freeze_moe_router": True}),
    "dense-tied-pp2-tp2": ("dense", PP2 | TP2),
    "dense-tied-sgd": ("dense", {"optimizer": {"use_distributed_optimizer": False, "optimizer": "sgd"}}),
}


def allocated(join: megatron_runs.Join, folder: Path, megatron: dict[str, Any]) -> dict[str, int]:
    """Bytes of this rank's parameters, gradient buffers and, after one step, optimizer state."""
    chunks, layout = megatron_runs.build(join, folder, **megatron)
    policy = PolicyConfig.model_validate(recipe_policy(folder, **megatron))
    trainer = optimizer.build_trainer(chunks, policy)
    for parameter in trainer.model[0].parameters():
        if parameter.requires_grad:
            parameter.main_grad.fill_(1.0)
    optimizer.apply_gradients(trainer, trainable=True)
    buffers = [*trainer.model[0].buffers, *trainer.model[0].expert_parallel_buffers]
    parts = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
    states = [state for part in parts for state in part.optimizer.state.values()]
    tensors = [value for state in states for value in state.values() if torch.is_tensor(value) and value.numel() > 1]
    return {
        "stage": layout.pp_rank,
        "weights": sum(p.numel() * p.element_size() for p in trainer.model[0].parameters()),
        "gradients": sum(buffer.grad_data.numel() * buffer.grad_data.element_size() for buffer in buffers),
        "optimizer": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
    }


@pytest.mark.parametrize("case", LAYOUTS)
@pytest.mark.parametrize("settings", [{}, PLAIN], ids=["sharded", "plain"])
def test_weights_gradients_and_optimizer_state_are_what_megatron_allocates(
    four_ranks: Ranks, tmp_path: Path, case: str, settings: dict[str, Any]
) -> None:
    kind, layout = LAYOUTS[case]
    megatron = settings | layout
    save_model(tmp_path, kind, tied=kind == "dense")
    ranks = four_ranks.call(allocated, tmp_path, megatron)
    overrides = {f"policy__megatron_cfg__{key}": value for key, value in megatron.items()}
    recipe = Recipe.model_validate(make_recipe(str(tmp_path), **overrides))
    parameters = model_parameters(make_model(kind, tied=kind == "dense").config.to_dict())
    cfg = recipe.policy.megatron_cfg
    dp = 4 // (cfg.tensor_model_parallel_size * cfg.pipeline_model_parallel_size)
    edp = 4 // (cfg.expert_model_parallel_size * cfg.expert_tensor_parallel_size * cfg.pipeline_model_parallel_size)
    predicted = [state_bytes(rank, recipe, dp, edp) for rank in rank_parameters(parameters, recipe)]
    for rank in ranks:
        expected = predicted[rank["stage"]]
        assert rank["weights"] == expected["weights"]
        if not cfg.optimizer.use_distributed_optimizer:
            assert rank["gradients"] == expected["gradients"]
            assert rank["optimizer"] == expected["optimizer"]
        else:
            # Sharded buffers are padded to 64 elements a parameter, and the shards cut at any element.
            assert expected["gradients"] <= rank["gradients"] <= expected["gradients"] * 1.05
    total = sum(predicted[rank["stage"]]["optimizer"] for rank in ranks)
    assert sum(rank["optimizer"] for rank in ranks) == pytest.approx(total, abs=4 * 8 * 4)
