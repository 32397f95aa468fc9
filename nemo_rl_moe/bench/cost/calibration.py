"""What part of its peak a machine reaches in training: few numbers, fitted to published results.

Fitted to published results of Qwen3-235B-A22B and Qwen3-30B-A3B on H100, 14 of which the model then gives within 9 %
(tests/unit/bench/test_cost.py has them). The report from Jupiter took no part: its 28.1 s come out within 5 %. Nothing
was fitted to Blackwell, to context parallelism or to other model families.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Calibration:
    """Shares of peaks and line rates, and times.

    Args:
        products: share of the peak in BF16 matrix products; `products_fp8`: of the FP8 peak (and of what builds on it).
        half_rows: rows of an expert's product at which it runs at half that speed. The two slow rows that set it have
            16 experts on a GPU besides, so it stands for all that many small experts cost.
        attention: share of the BF16 peak in attention scores and values.
        memory: share of the memory's rate that elementwise kernels, permutation and quantisation reach.
        network, nvlink: share of the line rate that dispatch, combine and collectives reach.
        hidden: share of the experts' traffic that 1F1B overlap hides, as far as there is computation to hide it.
        launch: seconds of each layer and micro-batch in which the GPU waits for the host; none under CUDA graphs of the
            router and preprocessing, which are what the host waits for.
        transfers: share of the pipeline's transfers that nothing hides.
        power: exponent with which speed follows a power cap: a third, as for dynamic power.
    """

    products: float = 0.59
    products_fp8: float = 0.43
    half_rows: float = 1500.0
    attention: float = 0.5
    memory: float = 0.75
    network: float = 0.9
    nvlink: float = 0.68
    hidden: float = 0.57
    launch: float = 6e-4
    transfers: float = 0.5
    power: float = 1 / 3


FITTED = Calibration()
