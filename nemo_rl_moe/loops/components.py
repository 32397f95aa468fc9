"""The parts of a run, built from the recipe and handed to the drivers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_moe.bench.flops.count import ModelFlops
from nemo_rl_moe.data.loader import PromptLoader
from nemo_rl_moe.data.prompt import Prompt
from nemo_rl_moe.environments.pool import VerifierPool
from nemo_rl_moe.loops.health import HealthGate
from nemo_rl_moe.recipe.plan import Plan
from nemo_rl_moe.recipe.schema import Recipe
from nemo_rl_moe.tracking.timers import PhaseTimer
from nemo_rl_moe.tracking.tracker import Tracker

if TYPE_CHECKING:
    from nemo_rl_moe.generation.generator import Generator
    from nemo_rl_moe.policy.policy import Policy
    from nemo_rl_moe.refit.synchronizer import WeightSynchronizer


@dataclass(frozen=True)
class Data:
    """Where prompts come from: the tokenizer, the training prompts in their order, and the validation prompts."""

    tokenizer: Any
    loader: PromptLoader
    validation_prompts: list[Prompt]


@dataclass
class Run:
    """Everything a driver needs.

    Attributes:
        flops: count of the model's FLOPs; None for a family that is not counted.
        health: watches the trained steps.
        weight_version: counts optimizer-updated weights; the generator follows it.
        start_step: the first step of this process, above 1 in a resumed run.
        row: metrics of the last step that ended.
        data_state: the loader's state after the prompts of the last step that was taken: what a checkpoint keeps.
    """

    recipe: Recipe
    plan: Plan
    policy: Policy
    generator: Generator
    synchronizer: WeightSynchronizer
    verifiers: VerifierPool
    data: Data
    tracker: Tracker
    timer: PhaseTimer
    run_dir: Path
    health: HealthGate
    flops: ModelFlops | None
    weight_version: int = 1
    start_step: int = 1
    row: dict[str, float] = field(default_factory=dict)
    data_state: dict[str, Any] = field(default_factory=dict)
