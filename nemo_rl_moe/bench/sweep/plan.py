"""What a sweep would run, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from nemo_rl_moe.bench.sweep.expand import Sweep
from nemo_rl_moe.bench.sweep.rank import Candidate, Ranking, gains
from nemo_rl_moe.recipe.memory.gpus import GIB
from nemo_rl_moe.recipe.source import shown

_TOP_REASONS = 12


def as_dict(sweep: Sweep, ranking: Ranking, measured: float | None) -> dict[str, Any]:
    """The plan as JSON data; predicted speeds follow `measured`, the base's own TFLOP/s/GPU, where it is given."""
    return {
        "base": _candidate(ranking.base, 1.0, _scale(ranking, measured)),
        "base_values": sweep.base_values,
        "combinations": len(ranking.kept) + len(ranking.dropped) + 1,
        "kept": [_candidate(c, gain, _scale(ranking, measured)) for c, gain in gains(ranking)],
        "dropped": [{"name": p.name, "changes": p.changes, "reasons": reasons} for p, reasons in ranking.dropped],
        "seconds": ranking.seconds,
    }


def _scale(ranking: Ranking, measured: float | None) -> float:
    """Factor on predicted speeds."""
    return 1.0 if measured is None or ranking.base.step is None else measured / ranking.base.step.tflops


def _candidate(candidate: Candidate, gain: float | None, scale: float) -> dict[str, Any]:
    step, memory = candidate.step, candidate.memory
    return {
        "name": candidate.point.name,
        "changes": candidate.point.changes,
        "gain": gain,
        "tflops": None if step is None else step.tflops * scale,
        "step_seconds": None if step is None else step.seconds / scale,
        "parts": None if step is None else {name: value for name, value in step.parts.items() if value},
        "memory_gib": None if memory is None else memory.total / GIB,
        "fits": candidate.fits,
    }


def lines(sweep: Sweep, ranking: Ranking, top: int, measured: float | None) -> list[str]:
    """The plan as text: what was dropped and why, the base, and the best points."""
    cluster = sweep.loaded.recipe.cluster
    made = len(ranking.kept) + len(ranking.dropped)
    text = [
        f"{sweep.loaded.name}: {made:,} points around the base on {cluster.num_nodes} nodes of "
        f"{cluster.gpus_per_node} {cluster.gpu_type or cluster.device}: {len(ranking.kept):,} left, "
        f"{len(ranking.dropped):,} dropped; checked and ranked in {ranking.seconds:.1f} s",
        *_dropped_lines(ranking),
        "",
        *_base_lines(sweep, ranking, measured),
        "",
    ]
    if not ranking.kept:
        return [*text, "no point is left"]
    return text + _table(ranking, top, _scale(ranking, measured))


def _dropped_lines(ranking: Ranking) -> list[str]:
    """One line for each rule, with how many points it took and the first of them."""
    counts = Counter(reasons[0].partition(":")[0] for _, reasons in ranking.dropped)
    found = []
    for rule, count in counts.most_common(_TOP_REASONS):
        point, reasons = next((p, r) for p, r in ranking.dropped if r[0].partition(":")[0] == rule)
        found.append(f"  {count:6,d} {rule}, such as {point.name}:{reasons[0].partition(':')[2]}")
    if len(counts) > _TOP_REASONS:
        found.append(f"         and {len(counts) - _TOP_REASONS} other rules; --json has every point")
    return found


def _base_lines(sweep: Sweep, ranking: Ranking, measured: float | None) -> list[str]:
    base = ranking.base
    values = " ".join(f"{name} {shown_value(value)}" for name, value in sweep.base_values.items())
    found = [f"base: {values}"]
    if base.step is None:
        return [*found, "  no prediction: name the GPU (cluster.gpu_type) and a model whose sizes are known"]
    memory = "" if base.memory is None else f", {base.memory.total / GIB:.1f} GiB before overhead: {base.fits}"
    found.append(f"  predicted {base.step.tflops:.1f} TFLOP/s/GPU, {base.step.seconds:.1f} s a step{memory}")
    found.append("  " + ", ".join(f"{name} {value:.1f} s" for name, value in shares(base.step.parts)))
    if measured is not None:
        found.append(
            f"  measured {measured:g} TFLOP/s/GPU: predictions below are scaled by {_scale(ranking, measured):.3f}"
        )
    return found


def shares(parts: Mapping[str, float]) -> Iterable[tuple[str, float]]:
    """Parts of a step, the largest first, without those that round to nothing."""
    return sorted(((n, v) for n, v in parts.items() if abs(v) >= 0.05), key=lambda item: -abs(item[1]))


def _table(ranking: Ranking, top: int, scale: float) -> list[str]:
    found = ["rank   gain  TFLOP/s/GPU  step s    GiB  fits     changes against the base"]
    for number, (candidate, gain) in enumerate(gains(ranking), 1):
        if number > top:
            found.append(f"… {len(ranking.kept) - top:,} more; --top N shows more, --json all")
            break
        step, memory = candidate.step, candidate.memory
        speed = (
            "     -            -       -"
            if step is None or gain is None
            else (f"{gain - 1:+6.1%}  {step.tflops * scale:10.1f}  {step.seconds / scale:6.1f}")
        )
        size = "     -" if memory is None else f"{memory.total / GIB:6.1f}"
        found.append(f"{number:4d} {speed} {size}  {candidate.fits:8s} {changes_text(candidate.point.changes)}")
    return found


def changes_text(changes: Mapping[str, Any]) -> str:
    """Changes of a point as one line."""
    return ", ".join(f"{name} {shown_value(value)}" for name, value in changes.items()) or "none"


def shown_value(value: Any) -> str:
    """A value without the quotes that YAML does not need."""
    return value if isinstance(value, str) else shown(value)
