#!/usr/bin/env python3
"""The controller's own time and memory: a whole async-1off run whose workers are fakes that answer at once.

    python tools/bench_controller.py [--factors 1,2,4,8] [--steps 3] [--write]

Real are the driver's process with all that it does (data, dispatch, batches, verifiers' requests, advantages,
micro-batches, shards, metrics, samples written down), Ray and its object store, and the verifier's process. The fakes
(`tools/bench/controller_workers.py`) only make arrays of the right size.

Time is the CPU time of the driver's process, all threads, for each step after the first two and before the last, during
which nothing is sampled ahead: what it waits for is not its own. Memory is the most that was resident in it, libraries
and Ray's shared memory included. Factor 1 is a step of 64 prompts of 512 tokens with 32 responses of 3,584 tokens each:
2,048 samples of 4,096 tokens. Larger factors have as many times the prompts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from tools.bench import report, workloads  # noqa: E402
from tools.bench.child import run_child  # noqa: E402
from tools.bench.our_recipe import async_one_off, plain_recipe  # noqa: E402
from tools.bench.report import Row, spread  # noqa: E402

ROOT = REPOSITORY / ".build/bench"
STEP = replace(
    workloads.FIXED, name="controller", num_prompts=64, group_size=32, prompt_tokens=512, max_new_tokens=3584
)
WARMUP = 2
WORKERS = "tools.bench.controller_workers"
# Two data-parallel ranks of two tensor-parallel ranks each, and two engines.
POLICY_RANKS, TENSOR_PARALLEL, ENGINES = 4, 2, 2
GOAL_S, GOAL_GB, GOAL_GROWTH = 2.0, 3.0, 1.1


def recipe(factor: int, steps: int, log_dir: Path) -> dict[str, Any]:
    """The recipe of a step `factor` times as large."""
    workload = replace(STEP, num_prompts=STEP.num_prompts * factor)
    plain = async_one_off(
        plain_recipe(workloads.make(STEP, ROOT), workload, threads=1, steps=WARMUP + steps + 1, log_dir=log_dir)
    )
    plain["cluster"] |= {"gpus_per_node": POLICY_RANKS + ENGINES, "oversubscribe_cpus": True}
    plain["policy"]["generation"]["colocated"]["resources"] = {"gpus_per_node": ENGINES}
    plain["policy"]["hf_config_overrides"] = {"max_position_embeddings": STEP.prompt_tokens + STEP.max_new_tokens}
    plain["policy"]["make_sequence_length_divisible_by"] = TENSOR_PARALLEL
    plain["policy"]["megatron_cfg"] |= {
        "tensor_model_parallel_size": TENSOR_PARALLEL,
        "expert_tensor_parallel_size": TENSOR_PARALLEL,
        "sequence_parallel": True,
    }
    # Not forced to 1: the pass of log-probabilities before the update is the controller's work too.
    plain["loss_fn"]["force_on_policy_ratio"] = False
    plain["logger"]["num_rollout_samples"] = 4
    return plain


def child(factor: int, steps: int) -> dict[str, Any]:
    """Runs the recipe in this process. Returns seconds and bytes."""
    import ray

    from nemo_rl_moe.loops import build
    from nemo_rl_moe.loops.run import run_recipe
    from nemo_rl_moe.policy.memory import peak_gib
    from nemo_rl_moe.recipe.load import load_recipe
    from nemo_rl_moe.tracking.tracker import Tracker

    build.POLICY_WORKER = f"{WORKERS}.FakePolicyWorker"
    build.ASYNC_GENERATION_WORKER = f"{WORKERS}.FakeGenerationWorker"
    marks: list[tuple[float, float]] = []
    log = Tracker.log

    def log_and_mark(self: Tracker, step: int, metrics: dict[str, float]) -> None:
        log(self, step, metrics)
        marks.append((time.process_time(), time.perf_counter()))

    Tracker.log = log_and_mark  # type: ignore[method-assign, assignment]
    with tempfile.TemporaryDirectory(prefix="bench-controller-") as folder:
        path = Path(folder) / "controller-async-1off.yaml"
        path.write_text(yaml.safe_dump(recipe(factor, steps, Path(folder) / path.stem)))
        ray.init(
            address="local",
            num_cpus=POLICY_RANKS + ENGINES,
            object_store_memory=(2 << 30) + factor * (1 << 30),
            include_dashboard=False,
            log_to_driver=False,
        )
        import torch

        code = run_recipe(load_recipe(path), resume=False)
        rows = [json.loads(line) for line in (Path(folder) / path.stem / "metrics.jsonl").read_text().splitlines()]
        ray.shutdown()
    if code != 0:
        raise RuntimeError(f"the run ended with {code}")
    phases = {name.removeprefix("timing/train/"): value for name, value in rows[-2].items() if "timing/train" in name}
    spans = list(itertools.pairwise(marks[WARMUP - 1 : -1]))
    return {
        "cpu_s": [after[0] - before[0] for before, after in spans],
        "wall_s": [after[1] - before[1] for before, after in spans],
        "tokens": rows[-1]["performance/total_num_tokens"],
        "gb": peak_gib(torch.device("cpu")) * 2**30 / 1e9,
        "phases": {name: round(value, 3) for name, value in phases.items()},
    }


def measure(factors: list[int], steps: int) -> tuple[list[Row], list[str]]:
    """Rows and notes of the table. The growth of time and memory is against the first factor."""
    rows, notes = [], []
    first: tuple[float, float] | None = None
    for factor in factors:
        load = report.load_average()
        command = [sys.executable, __file__, f"--child={factor}", f"--steps={steps}"]
        result = run_child(command, threads=1, name=f"controller x {factor}")
        seconds, gb = statistics.median(result["cpu_s"]), result["gb"]
        step = f"{STEP.samples * factor:,} samples x 4,096 tokens"
        cpu, memory = spread(result["cpu_s"], "s"), f"{gb:.2f} GB"
        if factor == 1:
            rows.append(Row(f"controller's own time in a step of {step}", cpu, "", seconds, GOAL_S, False, load))
            rows.append(Row(f"its most resident memory, {step}", memory, "", gb, GOAL_GB, False, load))
        if first is None:
            first = seconds / factor, gb / factor
        else:
            for what, text, ratio in (("time", cpu, seconds / first[0]), ("memory", memory, gb / first[1])):
                growth = f"{what} at {step}, a sample of it against one at {factors[0]} times"
                rows.append(Row(growth, text, "", ratio / factor, GOAL_GROWTH, False, load))
        wall = spread(result["wall_s"], "s")
        notes.append(f"{step}: whole step, fakes included, {wall}; seconds of one: {result['phases']}")
    return rows, notes


def main() -> int:
    """Command line. Returns 1 when a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--factors", default="1,2,4,8", help="how many times 2,048 samples, comma-separated")
    parser.add_argument("--steps", type=int, default=3, help="steps measured, after two of warm-up")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child, args.steps)))
        return 0
    rows, notes = measure([int(f) for f in args.factors.split(",")], args.steps)
    table = report.markdown(rows, notes)
    print(table)
    if args.write:
        report.write_into(REPOSITORY / "docs/benchmarks.md", "controller", table)
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
