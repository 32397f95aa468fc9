"""The few numbers of a model that the rules need, from its folder's config.json or from a small table of known models.

The table holds published config.json values of the models in the shipped recipes, so that a cluster recipe can be
checked on a laptop that has no copy of a 671B model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


_KNOWN = {
    "Qwen/Qwen3-30B-A3B": ModelShape(48, 2048, 32, 4, 128, 8, 40960, "qwen3_moe"),
    "Qwen/Qwen3-235B-A22B": ModelShape(94, 4096, 64, 4, 128, 8, 40960, "qwen3_moe"),
    "Qwen/Qwen3-32B": ModelShape(64, 5120, 64, 8, max_positions=40960, model_type="qwen3"),
    "deepseek-ai/DeepSeek-V3": ModelShape(61, 7168, 128, None, 256, 8, 163840, "deepseek_v3"),
    "meta-llama/Llama-3.1-8B-Instruct": ModelShape(32, 4096, 32, 8, max_positions=131072, model_type="llama"),
}


def model_shape(policy: PolicyConfig) -> ModelShape | None:
    """Shape of the recipe's model, `hf_config_overrides` applied; None when it cannot be known here."""
    config = Path(policy.model_name) / "config.json"
    if not config.is_file():
        return _KNOWN.get(policy.model_name)
    try:
        values: dict[str, Any] = json.loads(config.read_text(encoding="utf-8")) | policy.hf_config_overrides
        heads = values["num_attention_heads"]
        return ModelShape(
            num_layers=values["num_hidden_layers"],
            hidden_size=values["hidden_size"],
            num_heads=heads,
            num_kv_heads=None if values.get("kv_lora_rank") else values.get("num_key_value_heads", heads),
            # The families write the expert count under different names.
            num_experts=next(
                (values[k] for k in ("num_experts", "num_local_experts", "n_routed_experts") if k in values), 0
            ),
            experts_per_token=values.get("num_experts_per_tok", 0),
            max_positions=values.get("max_position_embeddings"),
            model_type=values.get("model_type", ""),
        )
    except (OSError, ValueError, KeyError):
        # A broken model folder is reported by the tokenizer and model loaders, with more to say about it.
        return None
