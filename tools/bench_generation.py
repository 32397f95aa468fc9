#!/usr/bin/env python3
"""Our generation worker against bare vLLM, side by side in one process, on the same prompts.

    python tools/bench_generation.py [--workload fixed-0.3M] [--rounds 15] [--threads 1] [--json]

`bare` is `vllm.LLM(...).generate` with vLLM's defaults: it returns token ids and text, and draws from one generator.
`bare+logprobs` also asks for the log-probability of each sampled token, without which its output is of no use to
reinforcement learning. `ours` returns ids and log-probabilities, and seeds each response by itself. The contenders take
turns within every round; the ratio is the median over rounds of tokens/s against `bare` in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tools")]


def set_environment(threads: int) -> None:
    """What a generation worker starts with; torch and vLLM read it when they are imported."""
    os.environ |= {
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
    }


def make_recipe(model: Path, limit: int) -> dict[str, Any]:
    """The least recipe for a generation worker on a CPU."""
    return {
        "policy": {
            "model_name": str(model),
            "precision": "float32",
            "max_total_sequence_length": limit,
            "generation": {},
        },
        "data": {"train": {"dataset_name": "jsonl", "path": "unused.jsonl"}},
        "env": {"math": {"verifier": "math_verify"}},
        "cluster": {"device": "cpu"},
    }


def make_contenders(workload: Any, folder: Path) -> dict[str, Callable[[int], int]]:
    """Name -> a function that samples one step with the given seed and returns the number of response tokens."""
    import numpy as np
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    from nemo_rl_moe.generation.interface import SamplingSpec
    from nemo_rl_moe.generation.vllm_worker import VllmWorker

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = (folder / "prompts.jsonl").read_text().splitlines()[: workload.num_prompts]
    prompts = [tokenizer(json.loads(row)["problem"])["input_ids"] for row in rows]
    limit = workload.prompt_tokens + workload.max_new_tokens
    worker = VllmWorker(make_recipe(folder / "model", limit), 0)
    worker.setup()
    bare = LLM(
        str(folder / "model"),
        dtype="float32",
        enforce_eager=True,
        max_model_len=limit,
        kv_cache_memory_bytes=256 << 20,
    )
    lengths = np.array([len(p) for p in prompts], dtype=np.int64)
    tokens = np.concatenate([np.array(p, dtype=np.int32) for p in prompts])
    common = {"n": workload.group_size, "temperature": 1.0, "max_tokens": workload.max_new_tokens}

    def run_bare(seed: int, **extra: Any) -> int:
        bare.reset_prefix_cache()
        requests = [{"prompt_token_ids": p} for p in prompts]
        outputs = bare.generate(requests, SamplingParams(**common, **extra), use_tqdm=False)
        return sum(len(c.token_ids) for o in outputs for c in o.outputs)

    def run_ours(seed: int) -> int:
        worker.reset_prefix_cache()
        spec = SamplingSpec(1.0, workload.max_new_tokens, workload.group_size, seed)
        return int(worker.generate(np.arange(len(prompts)), lengths, tokens, spec).lengths.sum())

    return {"bare": run_bare, "bare+logprobs": lambda seed: run_bare(seed, logprobs=0), "ours": run_ours}


def measure(contenders: dict[str, Callable[[int], int]], rounds: int) -> dict[str, dict[str, float]]:
    """Tokens per second of wall time: median, least and most over the rounds, and the median ratio to `bare`."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for seed in range(rounds + 1):
        for name, run in contenders.items():
            started = time.perf_counter()
            count = run(seed)
            rates[name].append(count / (time.perf_counter() - started))
    # The first round warms allocators and caches up.
    kept = {name: values[1:] for name, values in rates.items()}
    return {
        name: {
            "tokens_per_s": statistics.median(values),
            "least": min(values),
            "most": max(values),
            "ratio_to_bare": statistics.median(a / b for a, b in zip(values, kept["bare"], strict=True)),
        }
        for name, values in kept.items()
    }


def main() -> None:
    """Runs the bench and prints a table, or one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="fixed-0.3M", help="name in tools/bench/workloads.py")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    options = parser.parse_args()
    set_environment(options.threads)
    from bench.workloads import WORKLOADS, make

    workload = WORKLOADS[options.workload]
    folder = make(workload, REPOSITORY / ".build" / "bench")
    results = measure(make_contenders(workload, folder), options.rounds)
    if options.json:
        load = os.getloadavg()[0]
        print(json.dumps({"workload": workload.name, "threads": options.threads, "load": load, "results": results}))
        return
    print(
        f"{workload.name}: {workload.num_prompts} prompts of {workload.prompt_tokens} tokens x {workload.group_size} "
        f"responses, {options.threads} thread(s), {options.rounds} rounds, load average {os.getloadavg()[0]:.1f}"
    )
    for name, row in results.items():
        spread = f"{row['least']:.0f} to {row['most']:.0f}"
        print(f"{name:14s} {row['tokens_per_s']:8.0f} tokens/s  ({spread})  {row['ratio_to_bare']:.2f} of bare")


if __name__ == "__main__":
    main()
