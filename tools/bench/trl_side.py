"""TRL's GRPOTrainer on the same model, prompts and group size. Runs in TRL's own environment; prints one JSON line.

    python trl_side.py --folder .build/bench/fixed-0.3M --threads 2 --steps 30

It imports nothing of this project. The settings are TRL's fastest on a CPU that change nothing in the algorithm: one
backward pass over the whole batch, no gradient checkpointing, no old log-probabilities (one optimizer step for each
batch of samples), no tool or vLLM paths, scalar logging only.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer that adds up the seconds of its phases."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self.response_lengths: list[int] = []
        super().__init__(*args, **kwargs)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = super()._generate(*args, **kwargs)
        self.spent["generation"] += time.perf_counter() - started
        return result

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        if model is self.ref_model:
            self.spent["reference"] += time.perf_counter() - started
        return result

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        started = time.perf_counter()
        result = super()._generate_and_score_completions(inputs)
        self.spent["sampling_and_scoring"] += time.perf_counter() - started
        return result

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        started, scored = time.perf_counter(), self.spent["sampling_and_scoring"]
        result = super().training_step(*args, **kwargs)
        inner = self.spent["sampling_and_scoring"] - scored
        self.spent["forward_backward"] += time.perf_counter() - started - inner
        return result


class StepClock(TrainerCallback):
    """Seconds, wall and CPU, from the end of one step to the end of the next: nothing of a step is left out."""

    def __init__(self) -> None:
        self.trainer: TimedTrainer | None = None
        self.steps: list[dict[str, float]] = []
        self._last: tuple[float, float] | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now, processor = time.perf_counter(), time.process_time()
        assert self.trainer is not None
        if self._last is not None:
            wall, cpu = now - self._last[0], processor - self._last[1]
            self.steps.append({"step": wall, "cpu": cpu, **self.trainer.spent})
        self._last = now, processor
        self.trainer.spent.clear()


def reward(text: str) -> float:
    """1 for texts of an even number of characters: cheap, and not equal within a group."""
    return float(len(text) % 2 == 0)


def build(args: argparse.Namespace, workload: dict[str, Any]) -> tuple[TimedTrainer, StepClock]:
    """The trainer of the workload."""
    samples = workload["num_prompts"] * workload["group_size"]
    config = GRPOConfig(
        output_dir=str(args.output),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=samples,
        gradient_accumulation_steps=1,
        num_generations=workload["group_size"],
        max_completion_length=workload["max_new_tokens"],
        max_steps=args.warmup + args.steps,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        beta=0.04,
        # The balancing loss of the model's config would be a term that the other side does not compute.
        router_aux_loss_coef=0.0,
        temperature=1.0,
        top_k=0,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=1,
        model_init_kwargs={"dtype": "float32", "experts_implementation": args.experts},
        use_transformers_continuous_batching=args.continuous_batching,
    )
    rows = [json.loads(line)["problem"] for line in (args.folder / "prompts.jsonl").read_text().splitlines()]
    lengths: list[int] = []

    def length_parity(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.extend(len(ids) for ids in completion_ids)
        return [reward(text) for text in completions]

    model = str(args.folder / "model")
    clock = StepClock()
    trainer = TimedTrainer(
        model=model,
        reward_funcs=length_parity,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": rows}),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[clock],
    )
    trainer.response_lengths = lengths
    clock.trainer = trainer
    return trainer, clock


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="made by tools/bench/workloads.py")
    parser.add_argument("--output", type=Path, required=True, help="folder for TRL's files")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--steps", type=int, default=30, help="steps measured")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--experts", default="grouped_mm", help="expert kernels of transformers")
    parser.add_argument("--continuous-batching", action="store_true", help="paged generation of transformers")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    workload = json.loads((args.folder / "workload.json").read_text())["workload"]
    trainer, clock = build(args, workload)
    trainer.train()
    # The first step has no end of a step before it.
    steps = clock.steps[max(0, args.warmup - 1) :]
    samples = workload["num_prompts"] * workload["group_size"]
    result = {
        "versions": {m.__name__: m.__version__ for m in (trl, transformers, torch)},
        "threads": args.threads,
        "samples_per_step": samples,
        "steps": steps,
        "response_lengths": trainer.response_lengths[args.warmup * samples :],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
