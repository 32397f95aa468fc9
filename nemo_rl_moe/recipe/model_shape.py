"""The few numbers of a model that the rules need."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rl_moe.recipe.published_models import expert_count, model_config
from nemo_rl_moe.recipe.schema import PolicyConfig


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder: `num_experts` is 0 if dense, `num_kv_heads` None where heads share a latent (MLA)."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int | None
    num_experts: int = 0
    experts_per_token: int = 0
    max_positions: int | None = None
    model_type: str = ""

    @property
    def is_moe(self) -> bool:
        """Whether the model has routed experts."""
        return self.num_experts > 0


def model_shape(policy: PolicyConfig) -> ModelShape | None:
    """Shape of the recipe's model, `hf_config_overrides` applied; None when it cannot be known here."""
    values = model_config(policy)
    if values is None:
        return None
    try:
        heads = values["num_attention_heads"]
        return ModelShape(
            num_layers=values["num_hidden_layers"],
            hidden_size=values["hidden_size"],
            num_heads=heads,
            num_kv_heads=None if values.get("kv_lora_rank") else values.get("num_key_value_heads", heads),
            num_experts=expert_count(values),
            experts_per_token=values.get("num_experts_per_tok", 0),
            max_positions=values.get("max_position_embeddings"),
            model_type=values.get("model_type", ""),
        )
    except KeyError:
        return None
