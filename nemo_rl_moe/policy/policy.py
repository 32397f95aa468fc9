"""The driver's side of the trainer: splits a batch over the workers and puts their answers together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nemo_rl_moe.batch import ROUTED_EXPERTS, FloatArray, SequenceBatch
from nemo_rl_moe.cluster.worker_group import WorkerGroup
from nemo_rl_moe.policy.packing import MicrobatchPlan, plan_microbatches
from nemo_rl_moe.policy.routes import join_routes
from nemo_rl_moe.policy.shared_prompts import find_families
from nemo_rl_moe.policy.step_shard import TRAINED_VALUES, StepShard, count_loss_tokens
from nemo_rl_moe.policy.worker import MEMORY_PEAK, RankPlace
from nemo_rl_moe.recipe.schema import Recipe
from nemo_rl_moe.recipe.schema.policy import MegatronConfig
from nemo_rl_moe.refit.layout import WeightLayout


class Policy:
    """A Megatron trainer over a group of workers.

    Args:
        workers: one `PolicyWorker` for each device.
        recipe: the run.
    """

    def __init__(self, workers: WorkerGroup, recipe: Recipe) -> None:
        self._workers = workers
        self._recipe = recipe
        self._timeouts = recipe.cluster.timeouts
        self._places: list[RankPlace] = []

    def setup(self) -> None:
        """Builds the model on all workers and loads its weights.

        Raises:
            UserError: the model folder or the layout is wrong.
            PhaseTimeout: naming the ranks that did not answer.
        """
        limit = self._timeouts.setup_s
        host, port = self._workers.call_rank(0, "open_store", phase="policy: open store", timeout_s=limit)
        self._places = self._workers.call("setup", host, port, phase="policy: set-up", timeout_s=limit)

    def logprobs(self, batch: SequenceBatch, reference: bool = False) -> FloatArray:
        """Log-probability of each sampled token given those before it, at the sampling temperature.

        Args:
            reference: of the frozen reference instead of the policy.

        Returns:
            float32 [T]; 0 where `token_mask` is False, whose logits are never computed, and for the first token of a
            sequence, which nothing predicts.
        """
        routes = {} if reference else {k: v for k, v in batch.token_values.items() if k == ROUTED_EXPERTS}
        bare = SequenceBatch(batch.lengths, batch.tokens, batch.token_mask, routes)
        plan = self._plan(bare, training=False)
        results = self._workers.call(
            "logprobs",
            phase="policy: reference log-probabilities" if reference else "policy: log-probabilities",
            timeout_s=self._timeouts.logprob_s,
            per_worker=self._by_worker(plan.shards(bare)),
            reference=reference,
        )
        return self._joined(batch, plan, results)

    def logprobs_and_routes(self, batch: SequenceBatch) -> tuple[FloatArray, NDArray[np.signedinteger]]:
        """The policy's `logprobs` with its own experts, and the experts: [T, L, K] as in SequenceBatch."""
        bare = SequenceBatch(batch.lengths, batch.tokens, batch.token_mask)
        plan = self._plan(bare, training=False)
        results = self._workers.call(
            "logprobs_and_routes",
            phase="policy: log-probabilities",
            timeout_s=self._timeouts.logprob_s,
            per_worker=self._by_worker(plan.shards(bare)),
        )
        recorded = [
            (batch.token_index(plan.rank_samples(place.dp_rank)), routes)
            for place, (_, routes) in zip(self._places, results, strict=True)
            if routes is not None
        ]
        values = self._joined(batch, plan, [own for own, _ in results])
        return values, join_routes(len(batch.tokens), recorded)

    def _joined(self, batch: SequenceBatch, plan: MicrobatchPlan, results: Sequence[FloatArray | None]) -> FloatArray:
        values = np.zeros(len(batch.tokens), dtype=np.float32)
        for place, result in zip(self._places, results, strict=True):
            if place.reports and result is not None:
                done = 0
                for start, end in batch.token_spans(plan.rank_samples(place.dp_rank)):
                    values[start:end] = result[done : done + end - start]
                    done += end - start
        return values

    def train(self, batch: SequenceBatch) -> dict[str, float]:
        """One optimizer step for every `train_global_batch_size` samples, in order; the last may have fewer.

        Args:
            batch: token values `advantages`, `generation_logprobs`, `prev_logprobs` (unless the on-policy ratio is
                forced), `reference_logprobs` (with a KL term), `routed_experts` (with router replay); sample value
                `sample_mask`.

        Returns:
            The loss's metrics, `grad_norm`, `lr`, `skipped_steps`, `router_agreement` (with router replay),
            `policy/num_microbatches` (of one rank, over all optimizer steps), `policy/num_optimizer_steps`,
            `policy/padding_fraction` (pads among the tokens that went through the model) and `policy/memory_peak_gib`
            (of the rank with the most).
        """
        size = self._recipe.policy.train_global_batch_size
        values = {name: batch.token_values[name] for name in TRAINED_VALUES if name in batch.token_values}
        mask = {"sample_mask": batch.sample_values["sample_mask"]} if "sample_mask" in batch.sample_values else {}
        batch = SequenceBatch(batch.lengths, batch.tokens, batch.token_mask, values, mask)
        by_rank: list[list[StepShard]] = []
        microbatches = computed = 0
        starts = range(0, len(batch), size)
        for start in starts:
            step = batch.select(range(start, min(start + size, len(batch))))
            plan, counts = self._plan(step, training=True), count_loss_tokens(step)
            microbatches += plan.num_microbatches
            computed += plan.num_tokens
            by_rank = by_rank or [[] for _ in plan.ranks]
            for own, shard in zip(by_rank, plan.shards(step), strict=True):
                own.append(StepShard(shard, counts))
        results = self._workers.call(
            "train",
            phase="policy: training step",
            timeout_s=self._timeouts.train_s,
            per_worker=self._by_worker(by_rank),
        )
        reports = [r for place, r in zip(self._places, results, strict=True) if place.reports]
        # Counted where they are computed: with prepadding the ranks make rows longer than planned.
        slots = sum(report.pop("num_slots") for report in reports)
        return {
            **reports[0],
            "policy/num_microbatches": float(microbatches),
            "policy/num_optimizer_steps": float(len(starts)),
            "policy/padding_fraction": 1.0 - computed / slots,
            MEMORY_PEAK: max(result[MEMORY_PEAK] for result in results),
        }

    def weight_layout(self) -> WeightLayout:
        """Layout of the whole model in Hugging Face names and full shapes."""
        specs = self._workers.call_rank(
            0, "weight_specs", phase="policy: weight layout", timeout_s=self._timeouts.refit_s
        )
        return WeightLayout.build(specs)

    def export_weights(self, buffer_path: str) -> int:
        """Every rank writes its slices of every tensor into the file. Returns the elements that all wrote together."""
        phase = "refit: export weights"
        written = self._workers.call("export_weights", buffer_path, phase=phase, timeout_s=self._timeouts.refit_s)
        return sum(written)

    def save(self, folder: str) -> None:
        """Writes weights, optimizer, schedule and random state into the folder."""
        self._call("save", folder, phase="policy: save checkpoint", limit=self._timeouts.checkpoint_s)

    def load(self, folder: str) -> None:
        """Reads what `save` wrote. The reference stays the model that the run started from."""
        self._call("load", folder, phase="policy: load checkpoint", limit=self._timeouts.checkpoint_s)

    def save_hf(self, folder: str) -> None:
        """Writes the weights as a Hugging Face model folder, with the first model's configuration and tokenizer."""
        self._call("save_hf", folder, phase="policy: save Hugging Face model", limit=self._timeouts.checkpoint_s)

    def _call(self, method: str, argument: str, *, phase: str, limit: float) -> None:
        self._workers.call(method, argument, phase=phase, timeout_s=limit)

    def _plan(self, batch: SequenceBatch, *, training: bool) -> MicrobatchPlan:
        policy = self._recipe.policy
        packing = policy.sequence_packing
        rows = policy.train_micro_batch_size if training else policy.logprob_batch_size
        own_budget = packing.train_mb_tokens if training else packing.logprob_mb_tokens
        shared = packing.enabled and packing.share_prompts
        return plan_microbatches(
            batch.lengths,
            dp=1 + max(place.dp_rank for place in self._places),
            packed=packing.enabled,
            max_tokens=own_budget or policy.max_total_sequence_length * rows,
            max_rows=rows,
            divisible_by=row_multiple(policy.megatron_cfg, policy.make_sequence_length_divisible_by),
            same_shape=needs_same_shape(policy.megatron_cfg),
            families=find_families(batch) if shared else None,
        )

    def _by_worker(self, by_rank: Sequence[object]) -> list[tuple[object]]:
        """Each worker's argument, from one of each data-parallel rank.

        Tensor- and pipeline-parallel ranks of one data-parallel rank work on the same sequences, which leave this
        process once for all of them.
        """
        handles = [self._workers.put(value) for value in by_rank]
        return [(handles[place.dp_rank],) for place in self._places]


def row_multiple(cfg: MegatronConfig, own: int) -> int:
    """Row lengths are multiples of this: the recipe's own, and of TP where it splits the sequence."""
    return math.lcm(own, cfg.tensor_model_parallel_size if cfg.sequence_parallel else 1)


def needs_same_shape(cfg: MegatronConfig) -> bool:
    """Pipeline stages exchange tensors of one size; only the alltoall dispatcher takes unequal token counts.

    With prepadding the ranks agree on lengths micro-batch by micro-batch, which pads less than one shape for all.
    """
    equal_counts = cfg.moe_token_dispatcher_type != "alltoall" and not cfg.moe_hybridep_prepad_packed_inputs
    return cfg.pipeline_model_parallel_size > 1 or (cfg.expert_model_parallel_size > 1 and equal_counts)
