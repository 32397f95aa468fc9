#!/usr/bin/env python3
"""Hand-over of 200 MB of weights: trainer's parameters -> shared buffer -> engine.

    python tools/bench_refit.py [--rounds 10] [--threads 1] [--json]

The trainer is a real PolicyWorker with a Qwen3-MoE of 50 million float32 parameters in a process of its own, the
receiver a real VllmWorker in another. The first number is the rate at which the trainer's parameters reach the buffer
that the receiver has mapped; beside it stands the rate of one plain copy of as many bytes between two warm tensors in
the same process, measured in turns. The second is the engine's own reload: vLLM buffers, loads and packs every weight.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

_LIMIT_S = 600.0
# 50.8 million parameters.
_MODEL = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "moe_intermediate_size": 256,
    "num_layers": 6,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 64,
    "num_experts": 16,
}
# The one worker of a child process.
_workers: list[Any] = []


def set_environment(threads: int) -> None:
    """What workers start with; torch and vLLM read it when they are imported."""
    os.environ |= {
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": str(threads),
    }


def start_policy(recipe: dict[str, Any]) -> list:
    """Builds the trainer in this process. Returns its weight layout as plain rows."""
    from nemo_rl_moe.policy.worker import PolicyWorker
    from nemo_rl_moe.refit.layout import WeightLayout

    worker = PolicyWorker(recipe, 0, 1)
    worker.setup(*worker.open_store())
    _workers.append(worker)
    return WeightLayout.build(worker.weight_specs()).to_plain()


def time_export(path: str, nbytes: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each export into the buffer, and of each plain copy of as many bytes, taken in turns."""
    import torch

    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.zeros(nbytes, dtype=torch.uint8)
    exports, copies = [], []
    # The first round of both pays for page faults, once in a run.
    for _ in range(rounds + 1):
        started = time.perf_counter()
        _workers[0].export_weights(path)
        exported = time.perf_counter()
        target.copy_(source)
        copies.append(time.perf_counter() - exported)
        exports.append(exported - started)
    return exports[1:], copies[1:]


def start_engine(recipe: dict[str, Any]) -> None:
    """Builds the receiver in this process."""
    from nemo_rl_moe.generation.vllm_worker import VllmWorker

    _workers.append(VllmWorker(recipe, 0))
    _workers[0].setup()


def time_reload(update: dict[str, Any], rounds: int) -> list[float]:
    """Seconds of each weight update, first to last phase."""
    return [_workers[0].update_weights(update, version)["seconds"] for version in range(1, rounds + 2)][1:]


def measure(recipe: dict[str, Any], rounds: int) -> tuple[int, list[float], list[float], list[float]]:
    """Bytes, and seconds of exports, copies and reloads."""
    from nemo_rl_moe.refit.digest import weight_digest
    from nemo_rl_moe.refit.layout import WeightLayout
    from nemo_rl_moe.refit.shared_memory import SharedBuffer

    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as policy, ProcessPoolExecutor(1, spawn) as engine:
        layout = WeightLayout.from_plain(policy.submit(start_policy, recipe).result(_LIMIT_S))
        with SharedBuffer.create(layout.nbytes) as buffer:
            path = str(buffer.path)
            exports, copies = policy.submit(time_export, path, layout.nbytes, rounds).result(_LIMIT_S)
            engine.submit(start_engine, recipe).result(_LIMIT_S)
            digest = weight_digest(layout.views(buffer.tensor), 1)
            update = {"layout": layout.to_plain(), "digest": digest, "path": path}
            reloads = engine.submit(time_reload, update, rounds).result(_LIMIT_S)
    return layout.nbytes, exports, copies, reloads


def summarise(nbytes: int, exports: list[float], copies: list[float], reloads: list[float]) -> dict[str, Any]:
    """Medians, least and most; `ratio_to_memcpy` is the median of the ratios of neighbouring rounds."""

    def spread(values: list[float]) -> dict[str, float]:
        return {"median": statistics.median(values), "least": min(values), "most": max(values)}

    return {
        "bytes": nbytes,
        "export_gb_per_s": spread([nbytes / s / 1e9 for s in exports]),
        "memcpy_gb_per_s": spread([nbytes / s / 1e9 for s in copies]),
        "ratio_to_memcpy": statistics.median(b / a for a, b in zip(exports, copies, strict=True)),
        "reload_s": spread(reloads),
    }


def main() -> None:
    """Runs the bench and prints a table, or one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    options = parser.parse_args()
    set_environment(options.threads)
    from tools.bench.our_recipe import plain_recipe
    from tools.bench.workloads import Workload, make

    workload = Workload("refit-50M", **_MODEL)
    folder = make(workload, REPOSITORY / ".build" / "bench")
    results = summarise(*measure(plain_recipe(folder, workload, threads=options.threads), options.rounds))
    if options.json:
        print(json.dumps({"threads": options.threads, "load": os.getloadavg()[0], "results": results}))
        return
    print(f"{results['bytes'] / 1e6:.0f} MB, {options.threads} thread(s), load average {os.getloadavg()[0]:.1f}")
    for name, unit in (("export_gb_per_s", "GB/s"), ("memcpy_gb_per_s", "GB/s"), ("reload_s", "s")):
        row = results[name]
        print(f"{name:16s} {row['median']:.3f} {unit} ({row['least']:.3f} to {row['most']:.3f})")
    print(f"export at {results['ratio_to_memcpy']:.2f} of the memcpy rate")


if __name__ == "__main__":
    main()
