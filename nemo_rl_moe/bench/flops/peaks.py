"""Peak speed of each kind of GPU, against which model FLOPs utilisation is taken: one table, with sources."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rl_moe.bench.choices import nearest_choice


@dataclass(frozen=True)
class Peak:
    """Dense tensor-core peaks of one GPU in TFLOP/s by number format, its memory's TB/s, and the data sheet of both.

    Data sheets print figures with 2:4 sparsity, unless they say dense; those are halved here.
    """

    tflops: dict[str, float]
    memory: float
    source: str


_HOPPER = {"bf16": 989.4, "fp8": 1978.9}
PEAKS: dict[str, Peak] = {
    "h100": Peak(_HOPPER, 3.35, "NVIDIA H100 data sheet, SXM: 1,979 BF16 and 3,958 FP8 with sparsity; 3.35 TB/s"),
    "h200": Peak(_HOPPER, 4.8, "NVIDIA H200 data sheet, SXM: 1,979 BF16 and 3,958 FP8 with sparsity; 4.8 TB/s"),
    "gh200": Peak(
        _HOPPER,
        4.0,
        "NVIDIA GH200 data sheet: 990 BF16 and 1,979 FP8 dense, at the module's full power; 4 TB/s of the 96 GB part",
    ),
    "b200": Peak(
        {"bf16": 2250.0, "fp8": 4500.0, "nvfp4": 9000.0},
        8.0,
        "NVIDIA Blackwell data sheet, HGX B200, each GPU: 4.5 PF BF16, 9 PF FP8, 18 PF FP4 with sparsity",
    ),
    "gb200": Peak(
        {"bf16": 2500.0, "fp8": 5000.0, "nvfp4": 10000.0},
        8.0,
        "NVIDIA Blackwell data sheet, GB200 NVL72, each GPU: 5 PF BF16, 10 PF FP8, 20 PF FP4 with sparsity",
    ),
    "b300": Peak(
        {"bf16": 2250.0, "fp8": 4500.0, "nvfp4": 13500.0},
        8.0,
        "NVIDIA HGX B300 page, eight GPUs: 36 PF BF16 and 72 PF FP8 with sparsity, 108 PF FP4 dense",
    ),
    "gb300": Peak(
        {"bf16": 2500.0, "fp8": 5000.0, "nvfp4": 15000.0},
        8.0,
        "NVIDIA GB300 NVL72 page, 72 GPUs: 360 PF BF16 and 720 PF FP8 with sparsity, 1,080 PF FP4 dense",
    ),
}
# MXFP8 multiplies as fast as FP8: its scales are applied on the way.
_SAME = {"mxfp8": "fp8"}
PRECISIONS = ("bf16", "fp8", "mxfp8", "nvfp4")


def peak_tflops(gpu: str, precision: str) -> float:
    """Dense peak of one GPU in TFLOP/s.

    Raises:
        UserError: a GPU or number format that the table does not have; the message has the nearest that it has.
    """
    nearest_choice("GPU", gpu, PEAKS)
    nearest_choice("precision", precision, PRECISIONS)
    own = PEAKS[gpu].tflops
    nearest_choice(f"precision of {gpu}", _SAME.get(precision, precision), own)
    return own[_SAME.get(precision, precision)]
