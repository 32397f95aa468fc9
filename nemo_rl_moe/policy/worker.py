"""The trainer's actor: one Megatron rank on one device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nemo_rl_moe.batch import FloatArray
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.policy.packing import RankShard
from nemo_rl_moe.policy.routes import RecordedRoutes
from nemo_rl_moe.recipe.schema import Recipe

if TYPE_CHECKING:
    from nemo_rl_moe.policy.megatron.routing import Routing
    from nemo_rl_moe.policy.step_shard import StepShard

MEMORY_PEAK = "policy/memory_peak_gib"


@dataclass(frozen=True)
class RankPlace:
    """Where a worker stands in the parallel layout.

    Attributes:
        dp_rank: which part of every batch it works on.
        reports: whether its answers are the ones to take: one rank on the last pipeline stage of each dp_rank.
    """

    dp_rank: int
    reports: bool


class PolicyWorker:
    """One rank. Every method is called on all ranks at the same time, unless it says otherwise.

    Args:
        recipe: the resolved recipe, as plain values.
        rank: this worker's rank.
        world_size: number of workers.
    """

    def __init__(self, recipe: dict, rank: int, world_size: int) -> None:
        self._recipe = Recipe.model_validate(recipe)
        self._rank, self._world_size = rank, world_size
        self._store: Any = None
        on_cpu = self._recipe.cluster.device == "cpu"
        self._device = torch.device("cpu" if on_cpu else "cuda")
        if on_cpu:
            torch.set_num_threads(self._recipe.cluster.cpus_per_device)
            # It patches torch, so it must come before the first import of Megatron.
            from nemo_rl_moe.policy.megatron import cpu_backend

            cpu_backend.install()

    def open_store(self) -> tuple[str, int]:
        """Called on rank 0 only: opens the store at which the ranks meet, on a port that the system chooses.

        The port is in use from the moment it is known, so nobody can take it in between.
        """
        host = "127.0.0.1" if self._recipe.cluster.num_nodes == 1 else _own_address()
        self._store = self._open(host, 0, is_master=True)
        return host, self._store.port

    def setup(self, host: str, port: int) -> RankPlace:
        """Joins the other ranks, builds the model, loads its weights, and keeps them as the reference."""
        from nemo_rl_moe.policy.megatron import dispatcher, model, parallel, weights
        from nemo_rl_moe.policy.megatron.optimizer import build_trainer
        from nemo_rl_moe.policy.megatron.reference import ReferenceWeights

        policy = self._recipe.policy
        if policy.megatron_cfg.context_parallel_size > 1:
            raise UserError(
                "policy.megatron_cfg.context_parallel_size: the trainer does not split sequences; expected 1"
            )
        dispatcher.prepare(self._recipe, self._rank)
        if self._store is None:
            self._store = self._open(host, port, is_master=False)
        limits = self._recipe.cluster.timeouts
        self._layout = parallel.initialize(
            policy.megatron_cfg,
            self._store,
            self._rank,
            self._world_size,
            self._device,
            self._recipe.grpo.seed,
            timeout_s=max(limits.setup_s, limits.logprob_s, limits.train_s, limits.checkpoint_s),
        )
        self._shape = model.read_hf_config(policy.model_name, policy.hf_config_overrides)
        chunks = model.build_model(self._shape, policy, self._layout)
        weights.load_hf(chunks, policy.model_name, self._layout)
        self._chunks = chunks
        self._trainer = build_trainer(chunks, policy)
        skip_reference = self._recipe.grpo.skip_reference_policy_logprobs_calculation
        self._reference = None if skip_reference else ReferenceWeights(self._trainer.model)
        return RankPlace(self._layout.dp_rank, self._layout.is_last_stage and self._layout.tp_rank == 0)

    def logprobs(self, shard: RankShard, reference: bool = False) -> FloatArray | None:
        """float32 [T] log-probabilities of sampled tokens, 0 elsewhere; None on ranks that do not report.

        The policy's experts are those that the shard carries, the reference's are its own.
        """
        from nemo_rl_moe.policy.megatron.routing import Routing
        from nemo_rl_moe.policy.megatron.schedule import recorded_routing

        return self._logprobs(shard, reference, Routing.OWN if reference else recorded_routing(self._trainer, shard))

    def logprobs_and_routes(self, shard: RankShard) -> tuple[FloatArray | None, RecordedRoutes | None]:
        """The policy's `logprobs` with its own experts, and which they were in this rank's layers.

        Routes are None on ranks without such layers, and where a tensor-parallel neighbour gives the same.
        """
        from nemo_rl_moe.policy.megatron.microbatch import scatter_records
        from nemo_rl_moe.policy.megatron.routing import Routing

        values = self._logprobs(shard, False, Routing.RECORD)
        replay = self._trainer.replay
        if replay is None:
            raise UserError("policy.router_replay.enabled is false: no experts are recorded")
        if self._layout.tp_rank != 0 or not replay.layers:
            return values, None
        routes = scatter_records(shard, replay.take_records())
        return values, RecordedRoutes(replay.layers, replay.num_layers, routes)

    def _logprobs(self, shard: RankShard, reference: bool, routing: Routing) -> FloatArray | None:
        from megatron.core import parallel_state as mpu

        from nemo_rl_moe.policy.megatron.logprobs import token_logprobs
        from nemo_rl_moe.policy.megatron.schedule import run_schedule

        if reference and self._reference is None:
            raise UserError(
                "grpo.skip_reference_policy_logprobs_calculation is true: there is no reference to take "
                "log-probabilities from"
            )

        def consume(logits: torch.Tensor, sources: torch.Tensor | None, rows: Any) -> tuple[torch.Tensor, tuple]:
            values, _ = token_logprobs(
                logits,
                sources,
                rows.targets,
                temperature=self._recipe.policy.generation.temperature,
                vocab_size=self._shape.vocab_size,
                group=mpu.get_tensor_model_parallel_group(),
            )
            return values.new_zeros(()), (rows.token_index, values)

        reference_weights = self._reference.in_place_of(self._trainer.model) if reference and self._reference else None
        with torch.no_grad(), reference_weights or nullcontext():
            parts = run_schedule(
                self._trainer, shard, shard.batch.token_mask, consume, forward_only=True, routing=routing
            )
        if not (self._layout.is_last_stage and self._layout.tp_rank == 0):
            return None
        out = torch.zeros(len(shard.batch.tokens), dtype=torch.float32, device=self._device)
        for index, values in parts:
            out[index] = values
        return out.cpu().numpy()

    def train(self, steps: Sequence[StepShard]) -> dict[str, float]:
        """Optimizer steps; metrics as `train_steps` gives them, and of this rank `num_slots`, its tokens with its pads,
        and `policy/memory_peak_gib`.
        """
        from nemo_rl_moe.policy.megatron.train_step import train_steps
        from nemo_rl_moe.policy.memory import peak_gib

        generation, before = self._recipe.policy.generation, self._trainer.slots
        metrics = train_steps(
            self._trainer, steps, self._recipe.loss_fn, generation.temperature, self._shape.vocab_size
        )
        peak = peak_gib(self._device)
        if generation.colocated.enabled and self._device.type == "cuda":
            # The engine on this device wakes next, and torch would keep what the activations took.
            torch.cuda.empty_cache()
        return {**metrics, "num_slots": float(self._trainer.slots - before), MEMORY_PEAK: peak}

    def weight_specs(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Hugging Face name, dtype and full shape of every tensor. May be called on one rank."""
        from nemo_rl_moe.policy.megatron import weights

        dtype = getattr(torch, self._recipe.policy.precision)
        return [
            (name, str(kind).removeprefix("torch."), tuple(shape))
            for name, kind, shape in weights.hf_tensor_specs(self._shape, dtype)
        ]

    def export_weights(self, buffer_path: str) -> int:
        """Writes this rank's slices of every tensor into the shared buffer. Returns the elements written."""
        from nemo_rl_moe.policy.megatron import weights

        return weights.export_into(self._chunks, self._views(buffer_path), self._layout)

    def save(self, folder: str) -> None:
        """Writes the trainer's state into the folder."""
        from nemo_rl_moe.policy.megatron.checkpoint import save_checkpoint

        save_checkpoint(self._trainer, folder)

    def load(self, folder: str) -> None:
        """Reads what `save` wrote."""
        from nemo_rl_moe.policy.megatron.checkpoint import load_checkpoint

        load_checkpoint(self._trainer, folder)

    def save_hf(self, folder: str) -> None:
        """Writes a Hugging Face model folder."""
        from nemo_rl_moe.policy.megatron import weights

        weights.save_hf(self._chunks, folder, self._layout, self._recipe.policy.model_name)
        if self._rank == 0 and (overrides := self._recipe.policy.hf_config_overrides):
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | overrides, indent=2))

    def shutdown(self) -> None:
        """Leaves the process group."""
        from nemo_rl_moe.policy.megatron import parallel

        parallel.destroy()
        self._store = None

    def _views(self, buffer_path: str) -> dict[str, torch.Tensor]:
        """The buffer's tensors, mapped once: finding 18,000 names again at each refit would cost more than the copy."""
        from nemo_rl_moe.refit.layout import WeightLayout
        from nemo_rl_moe.refit.shared_memory import SharedBuffer

        if getattr(self, "_buffer_path", None) != buffer_path:
            layout = WeightLayout.build(self.weight_specs())
            self._buffer = SharedBuffer.attach(buffer_path, layout.nbytes)
            self._buffer_views = layout.views(self._buffer.tensor)
            self._buffer_path = buffer_path
        return self._buffer_views

    def _open(self, host: str, port: int, *, is_master: bool) -> Any:
        from datetime import timedelta

        limit = timedelta(seconds=self._recipe.cluster.timeouts.setup_s)
        return torch.distributed.TCPStore(
            host, port, self._world_size, is_master, timeout=limit, wait_for_workers=False
        )


def _own_address() -> str:
    """This host's address towards the other nodes."""
    # Imported here: without Ray's own processes the class serves tests, which need no address of a node.
    from ray.util import get_node_ip_address

    return get_node_ip_address()
