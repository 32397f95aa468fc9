"""Risk: memory planned for another number of parameters than the model has."""

from __future__ import annotations

import pytest

from nemo_rl_moe.recipe.memory.parameters import model_parameters
from tests.unit.policy.tiny_models import make_model

CASES = [
    ("dense", False, {}),
    ("dense", True, {}),
    ("moe", False, {}),
    ("moe", True, {"num_hidden_layers": 4, "mlp_only_layers": [1], "decoder_sparse_step": 2}),
]


@pytest.mark.parametrize(("kind", "tied", "changes"), CASES)
def test_counted_parameters_are_those_of_the_transformers_model(kind, tied, changes):
    model = make_model(kind, tied=tied, **changes)
    counted = model_parameters(model.config.to_dict())
    assert counted.total == sum(parameter.numel() for parameter in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert sum(layer.experts for layer in counted.layers) == experts
