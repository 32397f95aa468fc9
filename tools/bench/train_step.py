"""Our train step against a bare megatron-core loop: same model, same sequences, same optimizer, taking turns.

    python -m tools.bench.train_step --workload fixed-0.3M --threads 2 --rounds 15

Both sides live in this process and run A B A B, so that whatever else the machine does hits both alike. The bare loop
is what a pre-training script does: GPTModel from the local layer spec, DistributedDataParallel, distributed optimizer,
get_forward_backward_func, and the model's own cross-entropy on the response tokens. All sequences have one length, so
it needs no padding: its micro-batches are [rows, tokens] with the causal mask. Our side runs `Policy.train` whole:
micro-batch plan, packing, GRPO loss with KL term and metrics, gradient checks, update.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
import torch

from nemo_rl_moe.batch import SequenceBatch
from nemo_rl_moe.policy.policy import Policy
from nemo_rl_moe.policy.worker import PolicyWorker
from nemo_rl_moe.recipe.schema import Recipe
from tools.bench import workloads
from tools.bench.our_recipe import plain_recipe
from tools.bench.workloads import Workload


class InProcess:
    """One worker in this process, behind the call interface of a WorkerGroup."""

    size = 1

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def call(
        self, method: str, *args: Any, phase: str, timeout_s: float, per_worker: Sequence = ((),), **kwargs: Any
    ) -> list[Any]:
        """The worker's answer."""
        return [getattr(self._worker, method)(*args, *per_worker[0], **kwargs)]

    def call_rank(self, rank: int, method: str, *args: Any, phase: str, timeout_s: float, **kwargs: Any) -> Any:
        """The worker's answer."""
        return getattr(self._worker, method)(*args, **kwargs)


def equal_lengths_batch(workload: Workload, seed: int = 0) -> SequenceBatch:
    """A step's samples, all of prompt_tokens + max_new_tokens random tokens, with values of plausible size."""
    rng = np.random.default_rng(seed)
    length = workload.prompt_tokens + workload.max_new_tokens
    return _batch(workload, np.full(workload.samples, length), rng)


def varied_lengths_batch(workload: Workload, seed: int = 0) -> SequenceBatch:
    """A step's samples with response lengths of the workload's distribution."""
    rng = np.random.default_rng(seed)
    shortest = workload.min_response_tokens - 1
    drawn = shortest + rng.geometric(workload.end_probability, workload.samples)
    return _batch(workload, workload.prompt_tokens + np.minimum(drawn, workload.max_new_tokens), rng)


def _batch(workload: Workload, lengths: np.ndarray, rng: np.random.Generator) -> SequenceBatch:
    total = int(lengths.sum())
    within = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    logprobs = rng.normal(-6.0, 0.3, total).astype(np.float32)
    return SequenceBatch(
        lengths.astype(np.int64),
        rng.integers(3, workload.vocab_size, total).astype(np.int32),
        within >= workload.prompt_tokens,
        {
            "generation_logprobs": logprobs,
            "prev_logprobs": logprobs,
            "reference_logprobs": logprobs,
            "advantages": np.repeat(rng.normal(size=len(lengths)), lengths).astype(np.float32),
        },
        {"sample_mask": np.ones(len(lengths), dtype=np.float32)},
    )


def our_policy(folder: Path, workload: Workload, threads: int, **settings: Any) -> Policy:
    """A policy whose only worker is in this process."""
    recipe = Recipe.model_validate(plain_recipe(folder, workload, threads=threads, **settings))
    policy = Policy(InProcess(PolicyWorker(recipe.model_dump(mode="json"), 0, 1)), recipe)  # type: ignore[arg-type]
    policy.setup()
    return policy


class BareLoop:
    """A pre-training step of megatron-core, with nothing of this project but the CPU backend."""

    def __init__(self, workload: Workload, rows: int) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        config = _bare_config(workload)
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_decoder_block_spec(config, False, normalization="RMSNorm"),
            vocab_size=workload.vocab_size,
            max_sequence_length=1024,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
        config.finalize_model_grads_func = finalize_model_grads
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
        self._model = DistributedDataParallel(config, ddp, model)
        optimizer = OptimizerConfig(
            optimizer="adam",
            lr=1e-6,
            weight_decay=0.0,
            clip_grad=1.0,
            params_dtype=torch.float32,
            use_distributed_optimizer=True,
        )
        self._optimizer = get_megatron_optimizer(optimizer, [self._model], use_gloo_process_groups=False)
        self._rows = rows

    def train(self, batch: SequenceBatch) -> float:
        """One optimizer step on sequences of one length. Returns the loss."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        length = int(batch.lengths[0])
        tokens = torch.from_numpy(batch.tokens.astype(np.int64)).view(-1, length)
        mask = torch.from_numpy(batch.token_mask).view(-1, length).float().roll(-1, 1)
        labels, positions = tokens.roll(-1, 1), torch.arange(length).expand(self._rows, -1)
        count = len(tokens) // self._rows
        pieces = zip(tokens.split(self._rows), labels.split(self._rows), mask.split(self._rows), strict=True)

        def forward_step(iterator: Any, model: Any) -> tuple[torch.Tensor, Callable]:
            ids, targets, weights = next(iterator)
            losses = model(input_ids=ids, position_ids=positions, attention_mask=None, labels=targets)

            def mean(losses: torch.Tensor) -> tuple[torch.Tensor, dict]:
                loss = (losses * weights).sum() / weights.sum()
                return loss, {"loss": loss.detach()}

            return losses, mean

        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        parts = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(pieces),
            model=[self._model],
            num_microbatches=count,
            seq_length=length,
            micro_batch_size=self._rows,
            forward_only=False,
        )
        self._optimizer.step()
        return sum(float(p["loss"]) for p in parts) / count


def _bare_config(workload: Workload) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=workload.num_layers,
        hidden_size=workload.hidden_size,
        num_attention_heads=workload.num_heads,
        num_query_groups=workload.num_kv_heads,
        kv_channels=workload.head_dim,
        ffn_hidden_size=2 * workload.hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        num_moe_experts=workload.num_experts,
        moe_ffn_hidden_size=workload.moe_intermediate_size,
        moe_router_topk=workload.num_experts_per_tok,
        moe_router_pre_softmax=False,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_token_dispatcher_type="alltoall",
    )


def _default_rows(workload: Workload) -> int:
    """The largest part of the samples with at most 8192 tokens."""
    fitting = 8192 // (workload.prompt_tokens + workload.max_new_tokens)
    return max(n for n in range(1, max(1, fitting) + 1) if workload.samples % n == 0)


def take_turns(sides: dict[str, Callable[[], Any]], rounds: int, warmup: int = 3) -> dict[str, list[float]]:
    """Seconds of each call, side by side, in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(warmup + rounds):
        for name, call in sides.items():
            started = time.perf_counter()
            call()
            if i >= warmup:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=workloads.WORKLOADS, default=workloads.FIXED.name)
    parser.add_argument("--root", type=Path, default=Path(".build/bench"), help="folder of the workloads")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each side")
    parser.add_argument("--rows", type=int, default=None, help="sequences in a micro-batch of the bare loop")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    workload = workloads.WORKLOADS[args.workload]
    folder = workloads.make(workload, args.root)
    rows = args.rows or _default_rows(workload)
    policy = our_policy(folder, workload, args.threads)
    bare = BareLoop(workload, rows)
    batch = equal_lengths_batch(workload)
    seconds = take_turns({"ours": lambda: policy.train(batch), "bare": lambda: bare.train(batch)}, args.rounds)
    print(json.dumps({"threads": args.threads, "rows": rows, "seconds": seconds}))


if __name__ == "__main__":
    main()
