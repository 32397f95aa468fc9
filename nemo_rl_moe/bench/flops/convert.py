"""Tokens a second, TFLOP/s, seconds a step and utilisation: one speed said in four ways."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rl_moe.errors import UserError


@dataclass(frozen=True)
class Speed:
    """One training speed.

    Args:
        tokens_per_second: tokens a second and GPU.
        tflops: model TFLOP/s and GPU.
        step_seconds: seconds of one step; None without the step's tokens and GPUs.
        mfu: share of the peak; None without a peak.
        peak_tflops: the peak that the share is of.
    """

    tokens_per_second: float
    tflops: float
    step_seconds: float | None
    mfu: float | None
    peak_tflops: float | None


def convert(
    flops_per_token: float,
    *,
    tflops: float | None = None,
    tokens_per_second: float | None = None,
    step_seconds: float | None = None,
    mfu: float | None = None,
    tokens_per_step: float | None = None,
    gpus: int | None = None,
    peak: float | None = None,
) -> Speed:
    """Converts the one speed that is given.

    Args:
        flops_per_token: training FLOPs of a token (`count.training_flops_per_token`).
        tflops, tokens_per_second: each GPU's. step_seconds: of the whole step. mfu: a share, such as 0.25.
        tokens_per_step: tokens of all GPUs in one step.
        peak: TFLOP/s of one GPU.

    Raises:
        UserError: not one speed, one that is not above 0, or what a conversion needs is missing.
    """
    given = {"tflops": tflops, "tokens per second": tokens_per_second, "step seconds": step_seconds, "mfu": mfu}
    speeds = {name: value for name, value in given.items() if value is not None}
    if len(speeds) != 1:
        raise UserError(f"expected one speed of {', '.join(given)}, found {len(speeds)}")
    for name, value in speeds.items():
        if not 0 < value < float("inf"):
            raise UserError(f"{name} {value:g}: expected a number above 0")
    if step_seconds is not None:
        if tokens_per_step is None or gpus is None:
            raise UserError("step seconds need the global batch and the number of GPUs")
        tokens_per_second = tokens_per_step / step_seconds / gpus
    elif mfu is not None:
        if peak is None:
            raise UserError("a utilisation needs the GPU and the precision whose peak it is of")
        tflops = mfu * peak
    if tokens_per_second is None:
        assert tflops is not None
        tokens_per_second = tflops * 1e12 / flops_per_token
    tflops = tokens_per_second * flops_per_token / 1e12
    whole = tokens_per_step is not None and gpus is not None
    return Speed(
        tokens_per_second=tokens_per_second,
        tflops=tflops,
        step_seconds=tokens_per_step / tokens_per_second / gpus if whole else None,  # type: ignore[operator]
        mfu=None if peak is None else tflops / peak,
        peak_tflops=peak,
    )
