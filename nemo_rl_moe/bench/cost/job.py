"""What the time of a training step depends on, as plain numbers, whether a recipe or a published row says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nemo_rl_moe.bench.flops.count import model_flops
from nemo_rl_moe.bench.references.table import Layout, Result, System, systems
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.memory.parameters import Layer, ModelParameters, model_parameters
from nemo_rl_moe.recipe.published_models import expert_count


@dataclass(frozen=True, eq=False)
class ModelSizes:
    """Sizes of a model that communication and layout depend on.

    Args:
        config: its config.json.
    """

    config: Mapping[str, Any]

    @cached_property
    def parameters(self) -> ModelParameters | None:
        """Parameters by layer; None for a family that is not counted."""
        return model_parameters(self.config)

    @cached_property
    def flops(self) -> dict[str, tuple[float, float]]:
        """Training FLOPs by term of the whole model: of a token, and of an attended (query, key) pair."""
        return {t.name: (t.training_flops(1, 0), t.training_flops(0, 1)) for t in model_flops(self.config).terms}

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Decoder layers in order."""
        return () if self.parameters is None else self.parameters.layers

    @cached_property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return sum(layer.ffn == "moe" for layer in self.layers)

    @cached_property
    def experts(self) -> int:
        """Routed experts of a layer."""
        return expert_count(self.config)

    @property
    def experts_per_token(self) -> int:
        """Experts that a token is routed to."""
        return self.config.get("num_experts_per_tok", 0)

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.config["hidden_size"]

    @property
    def expert_width(self) -> int:
        """Values of a token that travel to an expert."""
        return self.config.get("moe_latent_size") or self.hidden


@dataclass(frozen=True, eq=False)
class Job:
    """One training job on one machine. Sequences are full, and the router is balanced.

    Args:
        tp, pp, vpp, cp, ep, etp: parallel sizes; vpp counts model chunks of a pipeline rank.
        precision: number format of the matrix products; dispatched tokens travel in bfloat16 under every one.
        overlap: whether the experts' all-to-all runs beside another micro-batch's computation.
        recompute: modules computed again in backward; `full` for whole layers.
        graphs: parts under CUDA graphs.
        sms: multiprocessors that the dispatcher takes; None is its default.
        stage_layers: layers of the fullest stage, and of the last, which has the output matrix besides; None divides
            them evenly, counting embedding and loss where the layers alone do not divide.
        gradient_bytes: bytes of a gradient that ranks reduce.
        gradient_overlap: whether gradients are reduced and parameters gathered beside the computation.
    """

    model: ModelSizes
    system: System
    gpus: int
    tp: int
    pp: int
    vpp: int
    cp: int
    ep: int
    etp: int
    global_batch: int
    micro_batch: int
    sequence: int
    precision: str = "bf16"
    dispatcher: str = "alltoall"
    overlap: bool = False
    recompute: frozenset[str] = frozenset()
    graphs: frozenset[str] = frozenset()
    sms: int | None = None
    stage_layers: tuple[int, int] | None = None
    gradient_bytes: int = 4
    gradient_overlap: bool = True

    @property
    def fullest_and_last_stage(self) -> tuple[int, int]:
        """Layers of the fullest stage and of the last."""
        if self.stage_layers is not None:
            return self.stage_layers
        layers = len(self.model.layers)
        most = -(-layers // self.pp)
        return most, most - 1 if layers % self.pp else most

    @property
    def dp(self) -> int:
        """Data-parallel size."""
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> int:
        """Data-parallel size of the experts."""
        return self.gpus // (self.ep * self.etp * self.pp)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a rank in one step."""
        return self.global_batch // (self.dp * self.micro_batch)

    @property
    def rank_tokens(self) -> int:
        """Tokens of a micro-batch that one rank routes: context and sequence parallelism share the row."""
        return self.micro_batch * self.sequence // (self.cp * self.tp)

    @property
    def stage_moe_layers(self) -> int:
        """Layers with experts on the fullest pipeline stage."""
        return -(-self.model.moe_layers // self.pp)


def job_of(result: Result, config: Mapping[str, Any], *, ep: int | None = None, system: System | None = None) -> Job:
    """A result's job, or the same one with another EP or on another machine.

    Raises:
        UserError: the result does not state GPUs, batch or sequence, or its layout does not divide.
    """
    missing = [name for name in ("gpus", "global_batch", "sequence") if getattr(result, name) is None]
    if missing:
        raise UserError(f"{result.id}: {' and '.join(missing)} not stated")
    layout = result.layout if ep is None else result.layout.model_copy(update={"ep": ep})
    sizes = ModelSizes(config)
    _check(result, layout, sizes)
    assert result.gpus and result.global_batch and result.sequence
    return Job(
        model=sizes,
        system=systems()[result.system] if system is None else system,
        gpus=result.gpus,
        tp=layout.tp,
        pp=layout.pp,
        vpp=layout.vpp,
        cp=layout.cp,
        ep=layout.ep,
        etp=layout.etp,
        global_batch=result.global_batch,
        micro_batch=result.micro_batch,
        sequence=result.sequence,
        precision=result.precision or "bf16",
        dispatcher=result.dispatcher or "alltoall",
        overlap=bool(result.a2a_overlap),
        recompute=frozenset(result.recompute or ()),
        graphs=frozenset(result.cuda_graphs or ()),
    )


def _check(result: Result, layout: Layout, sizes: ModelSizes) -> None:
    """The rules that a layout must keep for the arithmetic to mean anything."""
    from nemo_rl_moe.recipe.rules.divisors import near_divisors

    assert result.gpus and result.global_batch
    problems, world = [], result.gpus
    dense, experts = layout.tp * layout.pp * layout.cp, layout.ep * layout.etp * layout.pp
    if world % dense:
        rest = world // (layout.tp * layout.cp) if world % (layout.tp * layout.cp) == 0 else world
        problems.append(
            f"{world} GPUs are not a multiple of TP {layout.tp} x PP {layout.pp} x CP {layout.cp} = {dense}; "
            f"PP {near_divisors(rest, layout.pp)} would divide"
        )
    elif result.global_batch % (world // dense * result.micro_batch):
        step = world // dense * result.micro_batch
        low = result.global_batch // step * step
        problems.append(
            f"global batch {result.global_batch} is not a multiple of DP {world // dense} x micro-batch "
            f"{result.micro_batch}; nearest: {' or '.join(str(n) for n in (low, low + step) if n)}"
        )
    if world % experts:
        rest = world // layout.pp if world % layout.pp == 0 else world
        problems.append(
            f"{world} GPUs are not a multiple of EP {layout.ep} x ETP {layout.etp} x PP {layout.pp} = {experts}; "
            f"EP {near_divisors(rest, layout.ep)} would divide"
        )
    if sizes.experts and sizes.experts % layout.ep:
        problems.append(
            f"EP {layout.ep} does not divide {sizes.experts} experts; {near_divisors(sizes.experts, layout.ep)} does"
        )
    if problems:
        raise UserError("\n".join(f"{result.id}: {problem}" for problem in problems))
