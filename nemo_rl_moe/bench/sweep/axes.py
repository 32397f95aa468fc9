"""The axes of a sweep: what a short name such as `ep` means in a recipe, and what has to follow when it changes.

An axis writes its value into the plain recipe of a point. Afterwards the keys that depend on others are settled:
sequence parallelism follows TP, HybridEP's variables follow EP and the dispatcher, a chunk's layers follow VPP and PP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from nemo_rl_moe.recipe.schema.policy import GraphScope, RecomputeModule

Plain = dict[str, Any]

_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
_OF_POLICY = {"mbs": "train_micro_batch_size", "gbs": "train_global_batch_size"}
PRECISIONS = {
    "bf16": None,
    "fp8-tensorwise": ("tensorwise", False),
    "fp8-tensorwise-param": ("tensorwise", True),
    "fp8-blockwise": ("blockwise", False),
    "fp8-blockwise-param": ("blockwise", True),
    "mxfp8": ("mxfp8", False),
    "mxfp8-param": ("mxfp8", True),
}
_DISPATCHERS = ("alltoall", "allgather", "deepep", "hybridep")
_MOMENTS = ("fp32", "bf16")


class Impossible(Exception):
    """A value that the point's other values leave no meaning; the message says why."""


class BadValue(ValueError):
    """A value that an axis never takes; the message says what it takes."""


@dataclass(frozen=True)
class Axis:
    """One axis.

    Args:
        name: as in the sweep file.
        check: raises BadValue for a value that it never takes.
        write: puts a value into a plain recipe.
        read: the value that a plain recipe has; None where it has one that the axis cannot say (VPP: it is counted from
            the model's layers).
        settles: the dependent keys that a change of it touches, as names of functions of settle.py.
        in_memory: whether it changes what a GPU holds, as the estimate counts it.
        idle: why the axis changes nothing in a plain recipe; None where it does. Of several values the first is kept.
    """

    name: str
    check: Callable[[Any], None]
    write: Callable[[Plain, Any], None]
    read: Callable[[Plain], Any]
    settles: tuple[str, ...] = ()
    idle: Callable[[Plain], str | None] = lambda plain: None
    in_memory: bool = True


def _positive(value: Any) -> None:
    if type(value) is not int or value < 1:
        raise BadValue("expected a whole number of 1 or more")


def _one_of(*choices: Any) -> Callable[[Any], None]:
    def check(value: Any) -> None:
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise BadValue(f"expected one of {', '.join(map(_text, choices))}")

    return check


def _joined(whole: Sequence[str], parts: Sequence[str]) -> Callable[[Any], None]:
    def check(value: Any) -> None:
        if not isinstance(value, str) or (value not in whole and not set(value.split("+")) <= set(parts)):
            raise BadValue(f"expected {', '.join(whole)}, or any of {', '.join(parts)} joined by +")

    return check


def _text(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def _megatron(plain: Plain) -> Plain:
    return plain["policy"]["megatron_cfg"]


def _size_axis(name: str, key: str, settles: tuple[str, ...]) -> Axis:
    def write(plain: Plain, value: int) -> None:
        _megatron(plain)[key] = value

    return Axis(name, _positive, write, lambda plain: _megatron(plain)[key], settles)


def _policy_axis(name: str, key: str) -> Axis:
    def write(plain: Plain, value: int) -> None:
        plain["policy"][key] = value

    return Axis(name, _positive, write, lambda plain: plain["policy"][key])


def _write_vpp(plain: Plain, value: int) -> None:
    # How many layers that is depends on PP, so it is settled when all axes are written.
    plain["vpp"] = value


def _write_recompute(plain: Plain, value: str) -> None:
    modules = None if value in ("none", "full") else value.split("+")
    _megatron(plain).update(
        activation_checkpointing=value != "none",
        recompute_granularity="selective" if modules else "full",
        recompute_modules=modules,
    )


def _read_recompute(plain: Plain) -> str:
    megatron = _megatron(plain)
    if not megatron["activation_checkpointing"]:
        return "none"
    if megatron["recompute_granularity"] == "full":
        return "full"
    return "+".join(megatron["recompute_modules"] or ["core_attn"])


def _write_precision(plain: Plain, value: str) -> None:
    fp8 = _megatron(plain)["fp8_cfg"]
    recipe = PRECISIONS[value]
    fp8["enabled"] = recipe is not None
    fp8["fp8_param"] = False
    if recipe is not None:
        fp8["fp8_recipe"], fp8["fp8_param"] = recipe


def _read_precision(plain: Plain) -> str | None:
    fp8 = _megatron(plain)["fp8_cfg"]
    if not fp8["enabled"]:
        return "bf16"
    own = (fp8["fp8_recipe"], fp8["fp8_param"])
    return next((name for name, recipe in PRECISIONS.items() if recipe == own), None)


def _write_dispatcher(plain: Plain, value: str) -> None:
    flex = value in ("deepep", "hybridep")
    _megatron(plain).update(
        moe_token_dispatcher_type="flex" if flex else value, moe_flex_dispatcher_backend=value if flex else None
    )


def _read_dispatcher(plain: Plain) -> str:
    return _megatron(plain)["moe_flex_dispatcher_backend"] or _megatron(plain)["moe_token_dispatcher_type"]


def _write_sms(plain: Plain, value: int) -> None:
    _megatron(plain)["moe_hybridep_num_sms"] = value


def _sms_idle(plain: Plain) -> str | None:
    dispatcher = _read_dispatcher(plain)
    return None if dispatcher == "hybridep" else f"has no effect with dispatcher {dispatcher}"


def _write_overlap(plain: Plain, value: bool) -> None:
    # Megatron-core's overlap fills its gaps with the delayed weight gradients, as every published use of it does.
    _megatron(plain).update(overlap_moe_expert_parallel_comm=value, delay_wgrad_compute=value)


def _write_graphs(plain: Plain, value: str) -> None:
    on = value != "none"
    _megatron(plain).update(
        cuda_graph_impl="transformer_engine" if on else "none", cuda_graph_scope=value.split("+") if on else None
    )


def _read_graphs(plain: Plain) -> str | None:
    megatron = _megatron(plain)
    if megatron["cuda_graph_impl"] == "none":
        return "none"
    scope = megatron["cuda_graph_scope"]
    return "+".join(scope) if scope and megatron["cuda_graph_impl"] == "transformer_engine" else None


def _write_moments(plain: Plain, value: str) -> None:
    _megatron(plain)["optimizer"].update(
        use_precision_aware_optimizer=value != "fp32", exp_avg_dtype=value, exp_avg_sq_dtype=value
    )


def _read_moments(plain: Plain) -> str | None:
    formats = {_megatron(plain)["optimizer"][key] for key in ("exp_avg_dtype", "exp_avg_sq_dtype")}
    return formats.pop() if len(formats) == 1 else None


def _write_nodes(plain: Plain, value: int) -> None:
    plain["cluster"]["num_nodes"] = value


_SETTLES = {"tp": ("lengths",), "pp": ("chunks",), "cp": ("lengths",), "ep": ("hybrid_ep",), "etp": ()}

AXES: dict[str, Axis] = {
    **{name: _size_axis(name, key, _SETTLES[name]) for name, key in _SIZES.items()},
    **{name: _policy_axis(name, key) for name, key in _OF_POLICY.items()},
    "vpp": Axis("vpp", _positive, _write_vpp, lambda plain: None, ("chunks",)),
    "nodes": Axis("nodes", _positive, _write_nodes, lambda plain: plain["cluster"]["num_nodes"]),
    "recompute": Axis(
        "recompute", _joined(("none", "full"), get_args(RecomputeModule)), _write_recompute, _read_recompute
    ),
    "precision": Axis("precision", _one_of(*PRECISIONS), _write_precision, _read_precision),
    "dispatcher": Axis("dispatcher", _one_of(*_DISPATCHERS), _write_dispatcher, _read_dispatcher, ("hybrid_ep",)),
    "sms": Axis(
        "sms",
        _positive,
        _write_sms,
        lambda plain: _megatron(plain)["moe_hybridep_num_sms"],
        ("hybrid_ep",),
        _sms_idle,
        in_memory=False,
    ),
    "overlap": Axis(
        "overlap",
        _one_of(True, False),
        _write_overlap,
        lambda plain: _megatron(plain)["overlap_moe_expert_parallel_comm"],
        ("connections",),
    ),
    "graphs": Axis(
        "graphs", _joined(("none",), get_args(GraphScope)), _write_graphs, _read_graphs, ("graphs",), in_memory=False
    ),
    "moments": Axis("moments", _one_of(*_MOMENTS), _write_moments, _read_moments),
}
