"""The recipe schema: one strict pydantic model for each section, key names as NeMo-RL users know them."""

from __future__ import annotations

from nemo_rl_moe.recipe.schema.algorithm import GrpoConfig, LossConfig
from nemo_rl_moe.recipe.schema.base import Section
from nemo_rl_moe.recipe.schema.generation import GenerationConfig
from nemo_rl_moe.recipe.schema.policy import PolicyConfig
from nemo_rl_moe.recipe.schema.run import (
    BenchmarkConfig,
    CheckpointingConfig,
    ClusterConfig,
    DataConfig,
    DatasetConfig,
    EnvConfig,
    LoggerConfig,
)


class Recipe(Section):
    """A whole run. Everything a run is comes from here."""

    policy: PolicyConfig
    """The model, its trainer and its generator."""
    loss_fn: LossConfig = LossConfig()
    """The loss."""
    grpo: GrpoConfig = GrpoConfig()
    """The algorithm."""
    data: DataConfig
    """Prompts."""
    env: dict[str, EnvConfig]
    """Environments by name."""
    logger: LoggerConfig = LoggerConfig()
    """Run directory and trackers."""
    cluster: ClusterConfig = ClusterConfig()
    """Devices."""
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    """Checkpoints."""
    benchmark: BenchmarkConfig = BenchmarkConfig()
    """What `bench` does with the recipe."""


__all__ = [
    "BenchmarkConfig",
    "CheckpointingConfig",
    "ClusterConfig",
    "DataConfig",
    "DatasetConfig",
    "EnvConfig",
    "GenerationConfig",
    "GrpoConfig",
    "LoggerConfig",
    "LossConfig",
    "PolicyConfig",
    "Recipe",
    "Section",
]
