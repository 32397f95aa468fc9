"""`nemo-rl-moe bench gap`: one's own results against published ones."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_rl_moe.bench.cost.traffic import Traffic
from nemo_rl_moe.bench.flops.peaks import peak_tflops
from nemo_rl_moe.bench.references import gap
from nemo_rl_moe.bench.references.table import Result, flops_per_token, published, read_results, systems
from nemo_rl_moe.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("ours", type=Path, metavar="RESULTS", help="YAML file of one's own results, with their source")
    parser.add_argument(
        "--against", action="append", default=[], metavar="ID", help="a published result; may be repeated"
    )
    parser.add_argument(
        "--gemm-ratio", type=float, metavar="X", help="measured: a matrix product's speed here over there, such as 0.85"
    )


def run(arguments: argparse.Namespace) -> None:
    """Compares and prints.

    Raises:
        UserError: a wrong file, a layout that does not divide, an unknown model or reference.
    """
    answers = [_answer(result, arguments) for result in read_results(arguments.ours).results]
    if arguments.json:
        print(json.dumps([_as_dict(*answer) for answer in answers], indent=1))
    else:
        print("\n\n".join("\n".join(_lines(*answer)) for answer in answers))


def _answer(
    ours: Result, arguments: argparse.Namespace
) -> tuple[Result, list[gap.Comparison], list[tuple[str, int, Traffic]]]:
    if flops_per_token(ours) is None:
        raise UserError(
            f"{ours.id}: expected a sequence length and a model whose FLOPs are counted, found {ours.model}"
        )
    chosen = gap.choose(ours, arguments.against)
    machines = list(dict.fromkeys([ours.system, *(result.system for result in chosen)]))
    return (
        ours,
        [gap.compare(ours, result, arguments.gemm_ratio) for result in chosen],
        gap.traffic_by_size(ours, machines),
    )


def _as_dict(
    ours: Result, comparisons: list[gap.Comparison], traffic: list[tuple[str, int, Traffic]]
) -> dict[str, Any]:
    low, high = ours.speed_range
    return {
        "ours": ours.model_dump(),
        "step_seconds": [gap.step_seconds(ours, high), gap.step_seconds(ours, low)],
        "mfu": gap.utilisation(ours),
        "against": [
            {
                "id": item.reference.id,
                "tflops": item.reference.speed_range[1],
                "mfu": item.mfu,
                "ours_of_it": item.of_reference,
                "at_our_power": item.adjusted,
                "ours_of_that": item.of_adjusted,
                "differs": item.differs,
                "unstated": item.unstated,
                "caveats": _caveats(item.reference),
            }
            for item in comparisons
        ],
        "traffic": [{"system": machine, "ep": ep, **asdict(values)} for machine, ep, values in traffic],
    }


def _caveats(result: Result) -> list[str]:
    return [*result.caveats, *published()[1][result.source].caveats]


def _lines(ours: Result, comparisons: list[gap.Comparison], traffic: list[tuple[str, int, Traffic]]) -> list[str]:
    lines = [_own_line(ours), ""]
    width = max(len(item.reference.id) for item in comparisons)
    names = list(comparisons[0].adjusted)
    if names:
        lines.append(_power_line(ours.system))
    head = f"{'against':{width}s}  TFLOP/s  its peak  ours of it"
    lines.append(head + "".join(f"  {name + ': ours of it':>24s}" for name in names))
    for item in comparisons:
        share, speed = "-" if item.mfu is None else f"{item.mfu:.1%}", item.reference.speed_range[1]
        cells = (f"{item.adjusted[name]:.0f}: {_span(item.of_adjusted[name])}" for name in names)
        row = f"{item.reference.id:{width}s}  {speed:7g}  {share:>8s}  {_span(item.of_reference):>10s}"
        lines.append(row + "".join(f"  {cell:>24s}" for cell in cells))
    lines += ["", "what does not compare"]
    for item in comparisons:
        parts = [*item.differs, *(f"{name} not stated" for name in item.unstated), *item.reference.caveats]
        lines.append(f"  {item.reference.id}: {'; '.join(parts) or 'nothing that is stated'}")
    shared = {item.reference.source: published()[1][item.reference.source] for item in comparisons}
    lines += [f"  all of {name}: {text}" for name, source in shared.items() for text in source.caveats]
    return lines + _traffic_lines(ours, traffic)


def _power_line(name: str) -> str:
    system = systems()[name]
    if not system.power or not system.rated_power or system.power >= system.rated_power:
        return "at our power: by the measured ratio"
    return (
        f"at our power: {name} may take {system.power:g} of {system.rated_power:g} W ({system.power_is_of});"
        " a bracket, no target:\n"
        "  time on the network does not depend on power, and other machines' watts may be the GPU's alone"
    )


def _own_line(ours: Result) -> str:
    low, high = ours.speed_range
    flops = flops_per_token(ours) or 1.0
    parts = [f"{ours.id}: {_numbers(low, high, 'g')} TFLOP/s/GPU"]
    parts.append(f"{_numbers(low * 1e12 / flops, high * 1e12 / flops, ',.0f')} tokens/s/GPU")
    slow, fast = gap.step_seconds(ours, low), gap.step_seconds(ours, high)
    if slow is not None and fast is not None:
        parts.append(f"{_numbers(fast, slow, '.1f')} s a step")
    share = gap.utilisation(ours)
    if share is not None and ours.precision is not None:
        peak = peak_tflops(systems()[ours.system].gpu, ours.precision)
        parts.append(f"{_span(share)} of {peak:g} TFLOP/s (dense {ours.precision}, {systems()[ours.system].gpu})")
    return ", ".join(parts)


def _traffic_lines(ours: Result, traffic: list[tuple[str, int, Traffic]]) -> list[str]:
    if not traffic:
        return []
    lines = [
        "",
        f"experts' traffic of our step (bfloat16, {ours.dispatcher or 'alltoall'}) at line rate: a lower bound",
    ]
    lines.append("machine        EP  islands  copies a token  MB a transfer  network s/step  NVLink s/step")
    for machine, ep, values in traffic:
        mark = "  <- ours" if machine == ours.system and ep == ours.layout.ep else ""
        lines.append(
            f"{machine:12s} {ep:4d}  {values.islands:7d}  {values.remote_copies:14.2f}  "
            f"{values.transfer_bytes / 1e6:13.1f}  {values.network_seconds:14.1f}  {values.nvlink_seconds:13.1f}{mark}"
        )
    return lines


def _numbers(low: float, high: float, form: str) -> str:
    first, second = format(low, form), format(high, form)
    return first if first == second else f"{first}-{second}"


def _span(values: tuple[float, float]) -> str:
    return _numbers(values[0] * 100, values[1] * 100, ".0f" if values[1] > 0.2 else ".1f") + "%"
