"""One's own result against published ones: speed, utilisation, power, what does not compare, experts' traffic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nemo_rl_moe.bench.choices import nearest_choice
from nemo_rl_moe.bench.cost.job import job_of
from nemo_rl_moe.bench.cost.traffic import Traffic, expert_traffic
from nemo_rl_moe.bench.flops.models import find_model
from nemo_rl_moe.bench.flops.peaks import peak_tflops
from nemo_rl_moe.bench.references.table import Result, System, flops_per_token, published, systems
from nemo_rl_moe.errors import UserError

_HOPPER = ("h100", "h200", "gh200")
# What may differ between two runs, in the words of the output.
_COMPARED = {
    "gpus": "GPUs",
    "precision": "precision",
    "layout": "layout",
    "global_batch": "global batch",
    "micro_batch": "micro-batch",
    "dispatcher": "dispatcher",
    "a2a_overlap": "all-to-all overlap",
    "recompute": "recomputation",
    "cuda_graphs": "CUDA graphs",
    "routing": "routing",
    "dropless": "dropless",
}


@dataclass(frozen=True)
class Comparison:
    """One reference, seen from one's own result. Speeds are TFLOP/s a GPU.

    Args:
        reference: the published result.
        mfu: its share of its own peak; None where its precision is not stated.
        of_reference: lowest and highest share of its speed that one's own is.
        adjusted: its speed at one's own power, by the name of the assumption; empty without a cap.
        of_adjusted: lowest and highest share of the adjusted speed, likewise.
        differs: what differs between the runs; `unstated`: what the reference does not say.
    """

    reference: Result
    mfu: float | None
    of_reference: tuple[float, float]
    adjusted: dict[str, float]
    of_adjusted: dict[str, tuple[float, float]]
    differs: list[str]
    unstated: list[str]


def power_scales(system: System, gemm_ratio: float | None) -> dict[str, float]:
    """How much of an uncapped speed a capped machine may reach, by assumption.

    Clock and speed fall between linearly with power and with its cube root (dynamic power goes with frequency times
    voltage squared, and voltage falls with frequency). Time on the network does not depend on power at all, so even the
    linear end may be too low. A measured ratio of one matrix product, capped against not, replaces the guess.

    Args:
        gemm_ratio: speed of the same matrix product on this machine over that on the references'.
    """
    scales: dict[str, float] = {}
    if system.power and system.rated_power and system.power < system.rated_power:
        share = system.power / system.rated_power
        scales = {"linear": share, "cube root": share ** (1 / 3)}
    if gemm_ratio is not None:
        if not 0 < gemm_ratio <= 2:
            raise UserError(f"--gemm-ratio {gemm_ratio:g}: expected a ratio of two speeds, such as 0.85")
        scales["measured GEMM"] = gemm_ratio
    return scales


def choose(ours: Result, names: list[str]) -> list[Result]:
    """References by id; without ids, those of the same model, sequence and generation of GPUs, fastest first.

    Raises:
        UserError: an id that the table does not have, or no reference for the result.
    """
    table = published()[0]
    for name in names:
        nearest_choice("reference", name, table)
    if names:
        return [table[name] for name in names]
    model, hopper = find_model(ours.model)[0], systems()[ours.system].gpu in _HOPPER
    found = [
        result
        for result in table.values()
        if _model(result) == model
        and result.sequence == ours.sequence
        and (systems()[result.system].gpu in _HOPPER) == hopper
    ]
    if not found:
        raise UserError(f"{ours.id}: no published result of {model} with sequences of {ours.sequence} tokens")
    return sorted(found, key=lambda result: -result.speed_range[1])


def _model(result: Result) -> str:
    try:
        return find_model(result.model)[0]
    except UserError:
        return result.model


def utilisation(result: Result) -> tuple[float, float] | None:
    """Lowest and highest share of the peak of the result's precision; None where it is not stated."""
    if result.precision is None:
        return None
    peak = peak_tflops(systems()[result.system].gpu, result.precision)
    low, high = result.speed_range
    return low / peak, high / peak


def compare(ours: Result, reference: Result, gemm_ratio: float | None = None) -> Comparison:
    """Compares two results."""
    low, high = ours.speed_range
    speed, share = reference.speed_range[1], utilisation(reference)
    scales = power_scales(systems()[ours.system], gemm_ratio)
    stated = {key: (getattr(ours, key), getattr(reference, key)) for key in _COMPARED}
    return Comparison(
        reference=reference,
        mfu=None if share is None else share[1],
        of_reference=(low / speed, high / speed),
        adjusted={name: speed * scale for name, scale in scales.items()},
        of_adjusted={name: (low / speed / scale, high / speed / scale) for name, scale in scales.items()},
        differs=[
            f"{_COMPARED[key]} {shown(there)} there, {shown(here)} here"
            for key, (here, there) in stated.items()
            if here is not None and there is not None and _plain(here) != _plain(there)
        ],
        unstated=[_COMPARED[key] for key, (here, there) in stated.items() if here is not None and there is None],
    )


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value


def shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return "+".join(value) if value else "none"
    if hasattr(value, "model_dump"):
        sizes = {name: size for name, size in value.model_dump().items() if size > 1 or name in ("tp", "pp", "ep")}
        return " ".join(f"{name.upper()}{size}" for name, size in sizes.items())
    return str(value)


EXPERT_SIZES = (4, 8, 16, 32, 64)


def traffic_by_size(ours: Result, machines: list[str]) -> list[tuple[str, int, Traffic]]:
    """Experts' traffic of one's own job at every EP that its layout allows, on its machine and on others'.

    Raises:
        UserError: one's own layout does not divide, or GPUs, batch or sequence are not stated.
    """
    config = find_model(ours.model)[1]
    job_of(ours, config)  # One's own layout must be right; a size of the table that does not divide is left out.
    rows = []
    for machine in machines:
        for ep in EXPERT_SIZES:
            try:
                job = job_of(ours, config, ep=ep, system=systems()[machine])
            except UserError:
                continue
            if job.model.experts:
                rows.append((machine, ep, expert_traffic(job)))
    return rows


def step_seconds(result: Result, tflops: float) -> float | None:
    """Seconds of a step at a speed; None where batch, GPUs, sequence or the model's config are not known."""
    flops = flops_per_token(result)
    if flops is None or result.gpus is None or result.global_batch is None or result.sequence is None:
        return None
    return flops * result.global_batch * result.sequence / result.gpus / tflops / 1e12
