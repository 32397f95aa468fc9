"""Bytes of one trainer rank, term by term, for each pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_moe.recipe.hybrid_ep import tokens_per_rank, uses_hybrid_ep
from nemo_rl_moe.recipe.memory.activations import Saved, kept_activations, saved_activations
from nemo_rl_moe.recipe.memory.parameters import ModelParameters
from nemo_rl_moe.recipe.memory.stages import chunks_in_flight, stage_chunks
from nemo_rl_moe.recipe.schema import Recipe

# grpo/loss works on float32 pieces of the logits of this many values, one for the values and one for their gradient.
_LOGIT_PIECES = 2 * 4 * (1 << 24)


@dataclass(frozen=True)
class RankParameters:
    """Parameters on one rank of a stage.

    Args:
        dense: copied over DP x CP; experts: copied over expert-DP.
        frozen: not trained. matrices: those that fp8 training multiplies in fp8, so all but vocabulary, norms, router.
    """

    dense: int
    experts: int
    frozen: int
    matrices: int = 0

    @property
    def total(self) -> int:
        """All that the rank holds."""
        return self.dense + self.experts


def rank_parameters(parameters: ModelParameters, recipe: Recipe) -> list[RankParameters]:
    """Parameters of one rank on each pipeline stage. The vocabulary is padded to a multiple of TP."""
    megatron = recipe.policy.megatron_cfg
    tp = megatron.tensor_model_parallel_size
    expert_shards = megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size
    vocabulary = -(-parameters.vocab_size // tp) * parameters.hidden_size
    stages = stage_chunks(len(parameters.layers), megatron)
    result = []
    for stage, chunks in enumerate(stages):
        kinds = parameters.kinds(chunks)
        router = sum(count * layer.router for layer, count in kinds)
        cut = sum(count * ((layer.mixer + layer.dense) // tp) for layer, count in kinds)
        dense = cut + sum(count * layer.copied for layer, count in kinds) + router
        first, last = stage == 0, stage == len(stages) - 1
        # A tied head is the embedding itself, except on a last stage that does not hold the embedding.
        dense += vocabulary * (first + (last and (parameters.head > 0 or not first)))
        dense += parameters.hidden_size if last else 0
        experts = sum(count * layer.experts for layer, count in kinds) // expert_shards
        result.append(RankParameters(dense, experts, router if megatron.freeze_moe_router else 0, cut + experts))
    return result


def state_bytes(rank: RankParameters, recipe: Recipe, dp_cp: int, edp: int) -> dict[str, int]:
    """Weights, gradients and optimizer state of a rank.

    bfloat16 training keeps float32 master weights besides the optimizer's own state; the distributed optimizer shards
    both over DP x CP, and those of the experts over expert-DP.

    Args:
        dp_cp: data-parallel x context-parallel size.
        edp: expert-data-parallel size.
    """
    policy, megatron = recipe.policy, recipe.policy.megatron_cfg
    full = policy.precision == "float32"
    itemsize = 4 if full else 2
    gradient = 4 if full or megatron.distributed_data_parallel_config.grad_reduce_in_fp32 else 2
    formats = (megatron.optimizer.exp_avg_dtype, megatron.optimizer.exp_avg_sq_dtype)
    adam = sum(4 if name == "fp32" else 2 for name in formats)
    moments = adam if megatron.optimizer.optimizer == "adam" else 4 if megatron.optimizer.sgd_momentum else 0
    each = moments + (0 if full else 4)
    dense, experts = rank.dense - rank.frozen, rank.experts
    if megatron.optimizer.use_distributed_optimizer:
        dense, experts = -(-dense // dp_cp), -(-experts // edp)
    state = {
        "weights": rank.total * itemsize,
        "gradients": (rank.total - rank.frozen) * gradient,
        "optimizer": (dense + experts) * each,
    }
    copies = fp8_weight_bytes(recipe)
    return state | {"fp8 weights": int(rank.matrices * copies)} if copies else state


def fp8_weight_bytes(recipe: Recipe) -> float:
    """Bytes of fp8 copies for each matrix parameter, on top of two for bfloat16; 0 without fp8 training.

    Hopper multiplies fp8 matrices in one layout only, so it keeps each weight and its transpose; MXFP8 keeps both for
    its two directions of scales. With fp8 parameters those are all there is, without them they stand beside bfloat16.
    """
    fp8, gpu = recipe.policy.megatron_cfg.fp8_cfg, recipe.cluster.gpu_type
    if not fp8.enabled:
        return 0.0
    one = 1 + (1 / 32 if fp8.fp8_recipe == "mxfp8" else 0)
    copies = one if fp8.fp8_recipe in ("tensorwise", "delayed") and gpu in ("b200", "gb200", "gb300") else 2 * one
    return copies - 2 if fp8.fp8_param else copies


def row_tokens(recipe: Recipe, *, training: bool) -> int:
    """Tokens of the longest row that one micro-batch holds, before CP and SP shard it."""
    policy, packing = recipe.policy, recipe.policy.sequence_packing
    samples = policy.train_micro_batch_size if training else policy.logprob_batch_size
    budget = packing.train_mb_tokens if training else packing.logprob_mb_tokens
    return budget if packing.enabled and budget is not None else samples * policy.max_total_sequence_length


def most_micro_batches(recipe: Recipe, samples_per_rank: int) -> int:
    """Micro-batches of a rank in one optimizer step; packed rows may hold one sample only."""
    packed = recipe.policy.sequence_packing.enabled
    return samples_per_rank if packed else samples_per_rank // recipe.policy.train_micro_batch_size


def activation_bytes(
    config: Mapping[str, Any], parameters: ModelParameters, recipe: Recipe, stage: int, samples_per_rank: int
) -> int:
    """Activations that a stage keeps at its peak: all micro-batches in flight, and one layer at work."""
    megatron = recipe.policy.megatron_cfg
    chunks = stage_chunks(len(parameters.layers), megatron)[stage]
    saved = _saved_by_kind(config, parameters, recipe, chunks, row_tokens(recipe, training=True))
    in_flight = chunks_in_flight(
        stage,
        megatron.pipeline_model_parallel_size,
        len(chunks),
        most_micro_batches(recipe, samples_per_rank),
        overlap=megatron.overlap_moe_expert_parallel_comm,
    )
    kept = sum(count * kept_activations(layer, recipe) for layer, count in saved) / len(chunks)
    # The layer under recomputation is whole again, and backward holds about one gradient for what it reads.
    return int(in_flight * kept + max((layer.total for layer, _ in saved), default=0.0))


def _saved_by_kind(
    config: Mapping[str, Any], parameters: ModelParameters, recipe: Recipe, chunks: Sequence[range], tokens: int
) -> list[tuple[Saved, int]]:
    """What each different layer of a stage saves, and how many of it there are: a sweep asks for 10,000 recipes."""
    return [(saved_activations(config, layer, recipe, tokens), count) for layer, count in parameters.kinds(chunks)]


def forward_bytes(config: Mapping[str, Any], parameters: ModelParameters, recipe: Recipe, stage: int) -> int:
    """Activations of a forward pass without gradients: one layer at work."""
    chunks = stage_chunks(len(parameters.layers), recipe.policy.megatron_cfg)[stage]
    saved = _saved_by_kind(config, parameters, recipe, chunks, row_tokens(recipe, training=False))
    return int(max((layer.total for layer, _ in saved), default=0.0))


def logit_bytes(parameters: ModelParameters, recipe: Recipe, *, training: bool) -> int:
    """Logits of the last stage on this rank, in training with their gradient, and float32 pieces of both."""
    policy, megatron = recipe.policy, recipe.policy.megatron_cfg
    rows = row_tokens(recipe, training=training) / megatron.context_parallel_size
    if not training and policy.logprob_chunk_size is not None:
        rows = min(rows, policy.logprob_chunk_size)
    width = -(-parameters.vocab_size // megatron.tensor_model_parallel_size)
    copies, itemsize = 2 if training else 1, 4 if policy.precision == "float32" else 2
    logits = rows * width
    return int(copies * logits * itemsize + min(_LOGIT_PIECES, 2 * 4 * logits))


def dispatcher_bytes(config: Mapping[str, Any], parameters: ModelParameters, recipe: Recipe) -> int:
    """Buffers that carry tokens between the EP ranks.

    HybridEP registers room for every token of its NVLink domain once, and for those of the other domains on the way in
    and out. The other dispatchers hold a layer's sent and received copies while it runs.
    """
    megatron = recipe.policy.megatron_cfg
    ep = megatron.expert_model_parallel_size
    if ep == 1 or all(layer.ffn != "moe" for layer in parameters.layers):
        return 0
    itemsize = 4 if recipe.policy.precision == "float32" else 2
    width = config.get("moe_latent_size", config["hidden_size"]) * itemsize
    tokens = tokens_per_rank(recipe)
    if not uses_hybrid_ep(recipe):
        return int(2 * tokens * config.get("num_experts_per_tok", 1) * width)
    ranks = megatron.hybridep_num_ranks_per_nvlink_domain or _ranks_from_environment(recipe) or ep
    return int(tokens * ranks * width + 2 * tokens * (ep // ranks - 1) * width)


def _ranks_from_environment(recipe: Recipe) -> int | None:
    from nemo_rl_moe.recipe.hybrid_ep import RANKS_ENV

    text = (recipe.policy.megatron_cfg.env_vars or {}).get(RANKS_ENV, "")
    return int(text) if text.isdigit() and int(text) > 0 else None
