"""`nemo-rl-moe bench memory RECIPE`: the memory of `plan`, as a table of terms for each pipeline stage."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.load import load_recipe
from nemo_rl_moe.recipe.memory.estimate import Memory, Phase, UnknownModel, estimate_memory
from nemo_rl_moe.recipe.memory.gpus import GIB
from nemo_rl_moe.recipe.memory.stages import chunks_in_flight, pipeline_slots, stage_chunks
from nemo_rl_moe.recipe.memory.trainer import most_micro_batches
from nemo_rl_moe.recipe.model_shape import model_shape
from nemo_rl_moe.recipe.placement import model_parallel_size, split_devices
from nemo_rl_moe.recipe.schema import Recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="YAML recipe")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="such as cluster.gpu_type=h200")


def run(arguments: argparse.Namespace) -> None:
    """Estimates and prints.

    Raises:
        UserError: a wrong recipe, or a model whose sizes are not known here.
    """
    loaded = load_recipe(arguments.recipe, arguments.overrides)
    try:
        memory = estimate_memory(loaded.recipe)
    except UnknownModel as reason:
        raise UserError(f"policy.model_name: {reason}") from None
    stages = stage_rows(loaded.recipe)
    if arguments.json:
        print(json.dumps({"recipe": loaded.name, "stages": stages, **asdict(memory)}, indent=1))
    else:
        print("\n".join(_lines(loaded.name, memory, stages)))


def stage_rows(recipe: Recipe) -> list[dict[str, Any]]:
    """Layers of every pipeline stage, and how many micro-batches' worth of them keep activations at the peak."""
    shape, megatron = model_shape(recipe.policy), recipe.policy.megatron_cfg
    assert shape is not None
    stages = megatron.pipeline_model_parallel_size
    samples = recipe.policy.train_global_batch_size // (
        len(split_devices(recipe).policy) // model_parallel_size(recipe)
    )
    micro, overlap = most_micro_batches(recipe, samples), megatron.overlap_moe_expert_parallel_comm
    rows = []
    for stage, chunks in enumerate(stage_chunks(shape.num_layers, megatron)):
        in_flight = chunks_in_flight(stage, stages, len(chunks), micro, overlap=overlap)
        rows.append(
            {
                "stage": stage,
                "layers": sum(len(chunk) for chunk in chunks),
                "chunks": len(chunks),
                "chunks_in_flight": in_flight,
                "slots": pipeline_slots(shape.num_layers, megatron) // stages,
            }
        )
    return rows


def _lines(name: str, memory: Memory, stages: list[dict[str, Any]]) -> list[str]:
    size = (
        "unknown size (cluster.gpu_type)"
        if memory.device_bytes is None
        else f"{memory.device_bytes / GIB:.1f} GiB usable"
    )
    about = "" if memory.exact else "about "
    lines = [f"{name}: {about}{memory.parameters:,} parameters, devices of {size}; GiB on each"]
    for phase_name in dict.fromkeys(phase.name for phase in memory.phases):
        phases = [phase for phase in memory.phases if phase.name == phase_name]
        lines += ["", phase_name, *_table(phases, stages)]
    if memory.cache_tokens is not None:
        lines.append(f"one engine caches {memory.cache_tokens:,} tokens")
    if any(memory.host_per_node.values()):
        parts = (f"{text} {value / GIB:.1f}" for text, value in memory.host_per_node.items() if value)
        lines += ["", f"host memory of a node: {sum(memory.host_per_node.values()) / GIB:.1f} ({', '.join(parts)})"]
    lines += ["", *(f"assumed: {text}" for text in memory.assumptions)]
    return lines + [f"warning: {text}" for text in memory.problems]


def _table(phases: list[Phase], stages: list[dict[str, Any]]) -> list[str]:
    """One row for each stage (or engine), one column for each term that any of them has."""
    names = [
        name for name in dict.fromkeys(n for p in phases for n in p.terms) if any(p.terms.get(name) for p in phases)
    ]
    names = names or list(phases[0].terms)
    trains = phases[0].name == "training"
    head = "stage  layers  in flight" if trains else "stage" if phases[0].stage is not None else "     "
    lines = [head + "".join(f"  {name}" for name in names) + "   total  with overhead"]
    for phase in phases:
        row = "     " if phase.stage is None else f"{phase.stage:5d}"
        if trains and phase.stage is not None:
            own = stages[phase.stage]
            row += f"  {own['layers']:6d}  {own['chunks_in_flight']:3d}/{own['chunks']:<5d}"
        row += "".join(f"  {phase.terms.get(name, 0) / GIB:{len(name)}.1f}" for name in names)
        low, high = ((phase.total + part) / GIB for part in phase.overhead)
        verdict = "" if phase.verdict == "unknown" else f"  {phase.verdict}"
        lines.append(f"{row}  {phase.total / GIB:6.1f}  {low:.1f} to {high:.1f}{verdict}")
    return lines
