"""Seconds of a training step, part by part, from a job: what ranks the points of a sweep before anything runs.

A step is the pace of the slowest pipeline stage times the micro-batches, and the bubble. A stage's time is what its
layers compute, what memory-bound kernels move, what the experts' and tensor-parallel traffic takes, and the gaps in
which the GPU waits for its host. Constants and how well they hold: `calibration.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rl_moe.bench.cost.calibration import FITTED, Calibration
from nemo_rl_moe.bench.cost.job import Job
from nemo_rl_moe.bench.cost.traffic import expert_traffic
from nemo_rl_moe.bench.flops.peaks import PEAKS, peak_tflops
from nemo_rl_moe.recipe.memory.parameters import head_size

_BF16 = 2  # bytes
# Forward, and backward's two gradients, move about the same.
_PASSES = 3
_SCORES, _OUTPUT, _EXPERTS = "attention scores and values", "output matrix", "routed experts"


@dataclass(frozen=True)
class StepTime:
    """A step.

    Args:
        parts: seconds by what they are spent on; `hidden by overlap` is negative.
        flops_per_token: model FLOPs of a token.
    """

    parts: dict[str, float]
    flops_per_token: float
    tokens: int
    gpus: int

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return sum(self.parts.values())

    @property
    def tflops(self) -> float:
        """Model TFLOP/s a GPU."""
        return self.flops_per_token * self.tokens / self.gpus / self.seconds / 1e12


def step_time(job: Job, calibration: Calibration = FITTED) -> StepTime:
    """Predicted time of a job's step."""
    layer = _layer_parts(job, calibration)
    most, last = job.fullest_and_last_stage
    flops = job.model.flops
    output = flops[_OUTPUT][0] * _micro_tokens(job) / _rate(job, calibration, "bf16")
    each = sum(layer.values())
    # The last stage multiplies by the vocabulary too. Where that makes it the slowest, its layers set the pace.
    slowest_is_last = last * each + output > most * each
    layers, micro = last if slowest_is_last else most, job.micro_batches
    parts = {name: seconds * layers * micro for name, seconds in layer.items()}
    if slowest_is_last:
        parts["output matrix"] = output * micro
    stage = sum(parts.values())
    parts["pipeline bubble"] = stage * (job.pp - 1) / (job.vpp * micro)
    parts["gradient reduction"] = _reduction(job, calibration, stage / micro)
    per_token = sum(token + pair * job.sequence / 2 for token, pair in flops.values())
    return StepTime(parts, per_token, job.global_batch * job.sequence, job.gpus)


def _micro_tokens(job: Job) -> float:
    """Tokens of a micro-batch whose dense products one rank computes."""
    return job.micro_batch * job.sequence / (job.tp * job.cp)


def _cap(job: Job, calibration: Calibration) -> float:
    system = job.system
    if system.power and system.rated_power and system.power < system.rated_power:
        return (system.power / system.rated_power) ** calibration.power
    return 1.0


def _rate(job: Job, calibration: Calibration, precision: str) -> float:
    """FLOP/s of large matrix products."""
    share = calibration.products if precision == "bf16" else calibration.products_fp8
    return peak_tflops(job.system.gpu, precision) * 1e12 * share * _cap(job, calibration)


def _layer_parts(job: Job, calibration: Calibration) -> dict[str, float]:
    """Seconds of one layer and one micro-batch, forward and backward, on one rank."""
    model, count = job.model, max(len(job.model.layers), 1)
    tokens, rate = _micro_tokens(job), _rate(job, calibration, job.precision)
    linear = sum(t for name, (t, _) in model.flops.items() if name != _OUTPUT) * tokens / count
    experts = model.flops.get(_EXPERTS, (0.0, 0.0))[0] * tokens / count
    # Each pair of a sequence is computed on one of the TP x CP ranks.
    pairs = job.micro_batch * job.sequence**2 / 2 / (job.tp * job.cp)
    peak = peak_tflops(job.system.gpu, "bf16") * 1e12 * _cap(job, calibration)
    scores = model.flops.get(_SCORES, (0.0, 0.0))[1] * pairs / count / (peak * calibration.attention)
    small = experts * _small_experts(job, calibration) / rate
    again = (linear / rate + small + scores) / _PASSES if "full" in job.recompute else 0.0
    if "moe" in job.recompute and not again:
        again = (experts / rate + small) / _PASSES
    compute = {
        "matrix products": linear / rate,
        "small experts": small,
        "attention scores": scores,
        "memory-bound kernels": _moved_bytes(job) / (PEAKS[job.system.gpu].memory * 1e12 * calibration.memory),
        "recomputation": again,
        "tensor parallel": _tensor_parallel(job) / calibration.nvlink,
    }
    network, nvlink = _expert_seconds(job, calibration)
    hidden = min(network + nvlink, sum(compute.values())) * calibration.hidden if job.overlap else 0.0
    return compute | {
        "experts over network": network,
        "experts over NVLink": nvlink,
        "hidden by overlap": -hidden,
        "launch gaps": 0.0 if job.graphs & {"moe_router", "moe"} else calibration.launch,
        "pipeline transfers": _transfers(job, calibration),
    }


def _small_experts(job: Job, calibration: Calibration) -> float:
    """How much longer the experts' products take than large ones, from the rows that each expert gets."""
    if not job.model.experts:
        return 0.0
    rows = job.rank_tokens * job.model.experts_per_token * job.ep * job.etp / job.model.experts
    return calibration.half_rows / max(rows, 1.0)


def _moved_bytes(job: Job) -> float:
    """Bytes that kernels without matrix products read and write in one layer and micro-batch, on one rank.

    Counted per token of the rank in values of two bytes: residual and norms 8 hidden, rotary and head norms 4 of
    queries, keys and values, permutation there and back 2 (1 + k) hidden, SwiGLU 3 k widths.
    """
    config, chosen = job.model.config, job.model.experts_per_token
    hidden, width = job.model.hidden, config.get("moe_intermediate_size", config.get("intermediate_size", 0))
    heads = config["num_attention_heads"] + 2 * (config.get("num_key_value_heads") or 0)
    attention = head_size(config) * heads
    chosen_or_dense = max(chosen, 1)
    permuted = 2 * (1 + chosen) * job.model.expert_width if chosen else 0
    # The alltoall dispatcher sorts by rank and again by expert.
    values = 8 * hidden + 4 * attention + permuted * (2 if job.dispatcher == "alltoall" else 1)
    activation = 3 * chosen_or_dense * width
    total = (values + activation) * _BF16 * _PASSES
    total += activation * _BF16 if "moe_act" in job.recompute else 0
    total += 4 * hidden * _BF16 if "layernorm" in job.recompute else 0
    total *= 1 + 1 / _PASSES if "full" in job.recompute else 1
    if job.precision != "bf16":
        # Inputs and gradients of the products are read in bfloat16 and written twice in one byte.
        total += (
            chosen_or_dense * (hidden + 2 * width) + 2 * hidden + config["num_attention_heads"] * head_size(config)
        ) * 8
    return total * job.rank_tokens


def _tensor_parallel(job: Job) -> float:
    """Seconds at line rate: two gathers and two scatters of a layer's attention, and one more gather in backward."""
    if job.tp == 1:
        return 0.0
    row = job.micro_batch * job.sequence / job.cp * job.model.hidden * _BF16
    return 5 * row * (job.tp - 1) / job.tp / (job.system.nvlink_gbyte * 1e9)


def _expert_seconds(job: Job, calibration: Calibration) -> tuple[float, float]:
    """Dispatch and combine of one layer and micro-batch: over the network, and over NVLink."""
    traffic = expert_traffic(job)
    if not job.stage_moe_layers:
        return 0.0, 0.0
    each = job.stage_moe_layers * job.micro_batches
    return traffic.network_seconds / each / calibration.network, traffic.nvlink_seconds / each / calibration.nvlink


def _transfers(job: Job, calibration: Calibration) -> float:
    """A chunk's input and its gradient between pipeline stages, over the layers of the chunk."""
    if job.pp == 1:
        return 0.0
    row = job.rank_tokens * job.model.hidden * _BF16 / (job.system.network_gbit * 1e9 / 8)
    return 2 * row * job.vpp / max(job.fullest_and_last_stage[0], 1) * calibration.transfers / calibration.network


def _reduction(job: Job, calibration: Calibration, micro_batch_seconds: float) -> float:
    """Gradients reduced and parameters gathered over DP, and those of experts over expert DP, at the end of a step.

    With overlap they run beside the last backward and the first forward pass of a micro-batch.
    """
    parameters = job.model.parameters
    if parameters is None:
        return 0.0
    in_experts = sum(count * layer.experts for layer, count in parameters.kinds([range(len(parameters.layers))]))
    experts = in_experts / (job.ep * job.etp * job.pp)
    dense = (parameters.total - in_experts) / (job.tp * job.pp)
    each = job.gradient_bytes + _BF16
    ranks = job.dp * job.cp
    moved = (dense * (ranks - 1) / ranks + experts * (job.edp - 1) / max(job.edp, 1)) * each
    seconds = moved / (job.system.network_gbit * 1e9 / 8) / calibration.network
    return max(seconds - micro_batch_seconds, 0.0) if job.gradient_overlap else seconds
