"""The memory of a plan, as text."""

from __future__ import annotations

from nemo_rl_moe.recipe.memory.estimate import Memory, Phase
from nemo_rl_moe.recipe.memory.gpus import GIB, MIB
from nemo_rl_moe.recipe.plan import Plan


def memory_lines(layout: Plan) -> list[str]:
    """The plan's section on memory: each phase of each stage, terms of the fullest, host memory, what is assumed."""
    memory = layout.memory
    if memory is None:
        return [f"memory: not known: {layout.memory_unknown}"]
    about = "" if memory.exact else "about "
    size = "" if memory.device_bytes is None else f", {_amount(memory.device_bytes)} usable on each GPU"
    lines = [f"memory per {layout.device} device ({about}{memory.parameters:,} parameters{size})"]
    lines += [_phase_line(phase) for phase in memory.phases]
    fullest = [_fullest(memory, name) for name in dict.fromkeys(phase.name for phase in memory.phases)]
    for phase in fullest:
        lines += ["", f"  terms of {_label(phase)}"]
        lines += [f"    {name:24s} {_amount(size):>12s}" for name, size in phase.terms.items() if size]
    if memory.cache_tokens is not None:
        lines.append(f"    one engine caches {memory.cache_tokens:,} tokens")
    total = sum(memory.host_per_node.values())
    lines += ["", f"host memory per node: {_amount(total)}"]
    lines += [f"  {name:26s} {_amount(size):>12s}" for name, size in memory.host_per_node.items() if size]
    lines += [f"  assumed: {text}" for text in memory.assumptions]
    lines += [f"memory: warning: {text}" for text in memory.problems]
    return lines


def _fullest(memory: Memory, name: str) -> Phase:
    return max((phase for phase in memory.phases if phase.name == name), key=lambda phase: phase.total)


def _label(phase: Phase) -> str:
    return phase.name + ("" if phase.stage is None else f", pipeline stage {phase.stage}")


def _phase_line(phase: Phase) -> str:
    low, high = (phase.total + part for part in phase.overhead)
    total = _amount(low) if low == high else f"{_amount(low)} to {_amount(high)}"
    verdict = "" if phase.verdict == "unknown" else f"  {phase.verdict}"
    return f"  {_label(phase):36s} {total}{verdict}"


def _amount(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if abs(size) >= GIB else f"{size / MIB:.1f} MiB"
