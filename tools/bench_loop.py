#!/usr/bin/env python3
"""The speed of everything, side by side: one table with the machine, conditions, medians and spread.

    python tools/bench_loop.py [--parts train-step,trl-fixed,trl-varied,overhead,generation,refit,placements,
                                        compare]
                                [--write]

Each measurement runs in a process of its own, one after the other. Nothing here is a timed test: the table says which
goals were met on this machine, and the load of the machine beside each. `--write` puts each part into its section of
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from tools.bench import long_runs, our_side, report, trl_environment, workloads  # noqa: E402
from tools.bench.child import run_child  # noqa: E402
from tools.bench.report import Row, spread  # noqa: E402
from tools.bench.workloads import Workload  # noqa: E402

MAIN_RECIPE = REPOSITORY / "examples/configs/recipes/llm/grpo-tiny-moe-cpu.yaml"
ROOT = REPOSITORY / ".build/bench"
WARMUP = 3


class Bench:
    """Runs parts and collects rows and notes.

    Args:
        scale: steps of a full measurement are multiplied by it.
    """

    def __init__(self, scale: float) -> None:
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self._scale = scale

    def steps(self, full: int) -> int:
        """Steps to measure."""
        return max(3, round(full * self._scale))

    def train_step(self) -> None:
        """Our train step against a bare megatron-core loop."""
        for workload, threads in ((workloads.FIXED, 1), (workloads.FIXED, 2), (workloads.VARIED, 2)):
            load = report.load_average()
            command = [sys.executable, "-m", "tools.bench.train_step", f"--workload={workload.name}"]
            command += [f"--threads={threads}", f"--rounds={self.steps(20)}", f"--root={ROOT}"]
            seconds = run_child(command, threads=threads, name="train step")["seconds"]
            ours, bare = seconds["ours"], seconds["bare"]
            self._add(
                f"train step, {_shape(workload)} (all of full length), {_threads(threads)}, against bare megatron-core",
                spread(ours, "s"),
                spread(bare, "s"),
                statistics.median(bare) / statistics.median(ours),
                0.95,
                load,
            )

    def trl_fixed(self) -> None:
        """The whole loop against TRL: tiny model, all responses of 32 tokens."""
        for threads in (2, 1):
            self._against_trl(workloads.FIXED, threads, goal=1.0, steps=30)

    def trl_varied(self) -> None:
        """The whole loop against TRL: 20M parameters, responses of 8 to 256 tokens."""
        for workload in (workloads.VARIED, workloads.VARIED_LONG):
            self._against_trl(workload, 2, goal=2.0, steps=8)

    def overhead(self) -> None:
        """Share of a steady step of the main recipe that is none of the four things a step is for."""
        load = report.load_average()
        with tempfile.TemporaryDirectory(prefix="bench-main-") as temporary:
            log_dir = Path(temporary) / MAIN_RECIPE.stem
            settings = {"logger.log_dir": log_dir, "grpo.val_period": 0, "grpo.max_num_steps": WARMUP + self.steps(30)}
            our_side.run_recipe_file(MAIN_RECIPE, [f"{key}={value}" for key, value in settings.items()])
            steps = our_side.read_steps(log_dir / "metrics.jsonl", WARMUP)
        share = our_side.share_of_other(steps)
        self.rows.append(
            Row(
                "main recipe: share of a step that is neither generation, log-probabilities, training nor refit",
                spread([100 * s for s in share], "%", 2),
                "",
                statistics.median(share),
                0.05,
                False,
                load,
            )
        )

    def generation(self) -> None:
        """Our generation worker against a bare vllm.LLM."""
        for workload, threads, rounds in ((workloads.FIXED, 2, 15), (workloads.VARIED, 2, 4)):
            workloads.make(workload, ROOT)
            load = report.load_average()
            command = [sys.executable, str(REPOSITORY / "tools/bench_generation.py"), "--json"]
            command += [f"--workload={workload.name}", f"--threads={threads}", f"--rounds={self.steps(rounds)}"]
            results = run_child(command, threads=threads, name="generation")["results"]
            self._add(
                f"generation, {_shape(workload)}, {_threads(threads)}, against bare vllm.LLM",
                _rate(results["ours"]),
                _rate(results["bare"]),
                results["ours"]["ratio_to_bare"],
                0.95,
                load,
            )
            logprobs = results["bare+logprobs"]
            self.notes.append(
                f"generation, {workload.name}: bare vllm.LLM that also returns log-probabilities, as ours does: "
                f"{_rate(logprobs)}, {logprobs['ratio_to_bare']:.2f} of bare"
            )

    def refit(self) -> None:
        """200 MB of weights from the trainer's parameters to the receiver's buffer, against memcpy."""
        load = report.load_average()
        command = [sys.executable, str(REPOSITORY / "tools/bench_refit.py"), "--json", f"--rounds={self.steps(10)}"]
        results = run_child(command, threads=1, name="refit")["results"]
        self._add(
            f"refit of {results['bytes'] / 1e6:.0f} MB, trainer's parameters to the engine's buffer, against memcpy",
            _between(results["export_gb_per_s"], "GB/s"),
            _between(results["memcpy_gb_per_s"], "GB/s"),
            results["ratio_to_memcpy"],
            0.5,
            load,
        )
        self.notes.append(f"refit: the engine's own reload of the same weights: {_between(results['reload_s'], 's')}")

    def placements(self) -> None:
        """Async-1off, generation and training on one core each, against sync on the same two cores."""
        workload, count = workloads.BALANCED, self.steps(40)
        folder = workloads.make(workload, ROOT)
        load = report.load_average()
        settings: dict[str, dict[str, Any]] = {
            "async-1off": {"threads": 1, "split": True},
            "sync, each phase on one core": {"threads": 1},
            "sync, each phase on both cores": {"threads": 2},
        }
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in settings}
        for _ in range(2):
            for name, kwargs in settings.items():
                runs[name] += our_side.run_loop(folder, workload, steps=count, warmup=WARMUP, **kwargs)["steps"]
        # Means: a step that waited for the generator counts with its waiting.
        seconds = {name: [s["total_step_time"] for s in steps] for name, steps in runs.items()}
        ahead = seconds["async-1off"]
        for name in list(settings)[1:]:
            what = f"steps per hour, {_shape(workload)}: async-1off on 1 + 1 cores, against {name}"
            ratio = statistics.mean(seconds[name]) / statistics.mean(ahead)
            self._add(what, spread(ahead, "s"), spread(seconds[name], "s"), ratio, 1.5, load)
        idle = sum(s["exposed_generation"] for s in runs["async-1off"]) / sum(ahead)
        what = "async-1off: share of the time in which training waits for samples"
        self.rows.append(Row(what, f"{100 * idle:.1f} %", "", idle, 0.1, False, load))
        for name, steps in runs.items():
            self.notes.append(f"{name}: mean step {statistics.mean(seconds[name]):.3f} s ({_shares_of_ours(steps)})")

    def compare(self) -> None:
        """Two long runs compared from the command line, as a table and as a page."""
        with tempfile.TemporaryDirectory(prefix="bench-compare-") as temporary:
            page = Path(temporary) / "page.html"
            line = long_runs.command(Path(temporary))
            for form, options in (("table", []), ("table and page", ["--html", str(page)])):
                load = report.load_average()
                seconds = long_runs.seconds([*line, *options], self.steps(10))
                what = f"compare two runs of {long_runs.STEPS:,} steps x {long_runs.METRICS} metrics, {form}"
                goal, middle = long_runs.LIMIT_S, statistics.median(seconds)
                self.rows.append(Row(what, spread(seconds, "s"), "", middle, goal, False, load))

    def _against_trl(self, workload: Workload, threads: int, *, goal: float, steps: int) -> None:
        """Takes turns, two runs of each side, so that a slow minute of the machine hits both."""
        folder = workloads.make(workload, ROOT)
        python = trl_environment.ensure(REPOSITORY / ".build/trl-venv")
        load, count = report.load_average(), self.steps(steps)
        experts = self._best_experts(python, folder, workload, threads)
        sides: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
        for _ in range(2):
            sides["ours"].append(our_side.run_loop(folder, workload, threads=threads, steps=count, warmup=WARMUP))
            sides["trl"].append(
                trl_environment.run_trainer(
                    python, folder, workload, threads=threads, steps=count, warmup=WARMUP, experts=experts
                )
            )
        ours = [step for run in sides["ours"] for step in run["steps"]]
        trl = [step for run in sides["trl"] for step in run["steps"]]
        ours_s, trl_s = [s["total_step_time"] for s in ours], [s["step"] for s in trl]
        what = f"whole step, {_shape(workload)}, {_threads(threads)}, against TRL"
        ratio = statistics.median(trl_s) / statistics.median(ours_s)
        self._add(what, spread(ours_s, "s"), spread(trl_s, "s"), ratio, goal, load)
        ours_rate, trl_rate = (workload.samples / statistics.median(seconds) for seconds in (ours_s, trl_s))
        self.notes.append(
            f"{what}: ours {ours_rate:.1f} samples/s ({_shares_of_ours(ours)}), "
            f"TRL {trl_rate:.1f} samples/s ({_shares_of_trl(trl)}; {experts} experts)"
        )
        for name, runs in sides.items():
            lengths = [n for run in runs for n in run["response_lengths"]]
            self.notes.append(f"{what}: response tokens of {name}: {report.lengths_text(lengths)}")

    def _best_experts(self, python: Path, folder: Path, workload: Workload, threads: int) -> str:
        """TRL runs with whichever expert kernel of transformers is fastest here."""
        medians = {}
        for experts in ("grouped_mm", "eager"):
            result = trl_environment.run_trainer(
                python, folder, workload, threads=threads, steps=3, warmup=2, experts=experts
            )
            # Per token, because two short runs may draw responses of different lengths.
            tokens = sum(result["response_lengths"]) / len(result["steps"])
            medians[experts] = statistics.median(s["step"] for s in result["steps"]) / tokens
        return min(medians, key=medians.__getitem__)

    def _add(self, what: str, ours: str, reference: str, ratio: float, goal: float, load: float) -> None:
        self.rows.append(Row(what, ours, reference, ratio, goal, True, load))


def _between(result: dict[str, float], unit: str) -> str:
    return f"{result['median']:.3g} {unit} ({result['least']:.3g}-{result['most']:.3g})"


def _rate(result: dict[str, float]) -> str:
    return f"{result['tokens_per_s']:.0f} tokens/s ({result['least']:.0f}-{result['most']:.0f})"


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _shape(workload: Workload) -> str:
    size = workloads.parameters(workloads.make(workload, ROOT)) / 1e6
    return (
        f"{size:.2g}M-parameter Qwen3-MoE, {workload.num_prompts} prompts of {workload.prompt_tokens} tokens x "
        f"{workload.group_size} responses of "
        + (
            f"{workload.min_response_tokens} to {workload.max_new_tokens} tokens"
            if workload.end_probability
            else f"{workload.max_new_tokens} tokens"
        )
    )


def _shares_of_ours(steps: list[dict[str, float]]) -> str:
    names = {
        "generation": "generation",
        "policy_and_reference_logprobs": "reference",
        "policy_training": "training",
        "weight_sync": "refit",
    }
    total = sum(s["total_step_time"] for s in steps)
    return ", ".join(f"{label} {100 * sum(s[name] for s in steps) / total:.0f} %" for name, label in names.items())


def _shares_of_trl(steps: list[dict[str, float]]) -> str:
    total = sum(s["step"] for s in steps)
    shares = {name: sum(s[name] for s in steps) / total for name in ("generation", "reference")}
    # Forward, backward and the optimizer: the rest of the step apart from rewards and logging, which are small.
    scored = sum(s["sampling_and_scoring"] for s in steps) / total
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in {**shares, "training": 1 - scored}.items())


PARTS: dict[str, Callable[[Bench], None]] = {
    "train-step": Bench.train_step,
    "trl-fixed": Bench.trl_fixed,
    "trl-varied": Bench.trl_varied,
    "overhead": Bench.overhead,
    "generation": Bench.generation,
    "refit": Bench.refit,
    "placements": Bench.placements,
    "compare": Bench.compare,
}


def main() -> int:
    """Command line. Returns 1 when a goal was missed, so that a script can tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated; default: all")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full number of steps")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/benchmarks.md")
    args = parser.parse_args()
    wanted = args.parts.split(",")
    unknown = [name for name in wanted if name not in PARTS]
    if unknown:
        parser.error(f"--parts: {', '.join(unknown)}; expected some of {', '.join(PARTS)}")
    met = True
    for name in wanted:
        print(f"measuring {name} (load {report.load_average():.1f})", file=sys.stderr, flush=True)
        bench = Bench(args.scale)
        PARTS[name](bench)
        table = report.markdown(bench.rows, bench.notes)
        print(f"\n{table}", flush=True)
        if args.write:
            report.write_into(REPOSITORY / "docs/benchmarks.md", name, table)
        met &= all(row.met for row in bench.rows)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
