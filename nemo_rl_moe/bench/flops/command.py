"""`nemo-rl-moe bench flops`: arguments, input, output."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from nemo_rl_moe.bench.flops.convert import Speed, convert
from nemo_rl_moe.bench.flops.count import ModelFlops, attended_pairs, training_flops
from nemo_rl_moe.bench.flops.models import count_model
from nemo_rl_moe.bench.flops.peaks import PEAKS, PRECISIONS, peak_tflops
from nemo_rl_moe.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options; --json is common to all commands."""
    parser.add_argument("--model", required=True, metavar="NAME", help="published model, model folder or config.json")
    tokens = parser.add_mutually_exclusive_group()
    tokens.add_argument("--seq", type=int, metavar="N", help="tokens of every sequence (default 4096)")
    tokens.add_argument(
        "--lengths", metavar="N,N…", help="tokens of each sequence, packed or not: each attends to itself only"
    )
    parser.add_argument("--mtp", type=int, default=0, metavar="N", help="multi-token-prediction layers trained along")
    speed = parser.add_mutually_exclusive_group()
    speed.add_argument("--tflops", type=float, metavar="X", help="convert this speed: TFLOP/s/GPU")
    speed.add_argument("--tokens-per-second", type=float, metavar="X", help="… tokens/s/GPU")
    speed.add_argument("--step-seconds", type=float, metavar="X", help="… seconds a step")
    speed.add_argument("--mfu", type=float, metavar="PERCENT", help="… share of the GPU's peak")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs of the run, for seconds a step")
    parser.add_argument("--global-batch", type=int, metavar="N", help="sequences of a step, likewise")
    parser.add_argument("--gpu", metavar="TYPE", help=f"whose peak: {', '.join(PEAKS)}")
    parser.add_argument("--precision", default="bf16", metavar="FORMAT", help=f"of the peak: {', '.join(PRECISIONS)}")


def run(arguments: argparse.Namespace) -> None:
    """Counts, converts and prints.

    Raises:
        UserError: unknown model, GPU or format, wrong numbers, or a conversion without what it needs.
    """
    lengths = _lengths(arguments)
    for name in ("mtp", "gpus", "global_batch"):
        value = getattr(arguments, name)
        if value is not None and value < (name != "mtp"):
            raise UserError(f"--{name.replace('_', '-')} {value}: expected {'0' if name == 'mtp' else '1'} or more")
    name, config, count = count_model(arguments.model, arguments.mtp)
    peak = None if arguments.gpu is None else peak_tflops(arguments.gpu, arguments.precision)
    speed = _speed(arguments, count, lengths, peak)
    answer = _as_dict(name, count, lengths, speed)
    answer["notes"] = [*count.notes, *_mtp_note(config, arguments.mtp)]
    if arguments.gpu is not None:
        answer["peak"] = {"gpu": arguments.gpu, "precision": arguments.precision, "tflops": peak}
        answer["peak"]["source"] = PEAKS[arguments.gpu].source
    print(json.dumps(answer, indent=1) if arguments.json else "\n".join(_lines(answer)))


def _lengths(arguments: argparse.Namespace) -> list[int]:
    if arguments.lengths is None:
        lengths = [4096 if arguments.seq is None else arguments.seq]
    else:
        try:
            lengths = [int(text) for text in arguments.lengths.split(",")]
        except ValueError:
            raise UserError(f"--lengths {arguments.lengths}: expected whole numbers with commas between") from None
    if min(lengths) < 1:
        option = "--seq" if arguments.lengths is None else "--lengths"
        raise UserError(f"{option} {min(lengths)}: expected 1 token or more")
    return lengths


def _speed(arguments: argparse.Namespace, count: ModelFlops, lengths: list[int], peak: float | None) -> Speed | None:
    given = (arguments.tflops, arguments.tokens_per_second, arguments.step_seconds, arguments.mfu)
    if all(value is None for value in given):
        return None
    mean = sum(lengths) / len(lengths)
    return convert(
        training_flops(count, lengths) / sum(lengths),
        tflops=arguments.tflops,
        tokens_per_second=arguments.tokens_per_second,
        step_seconds=arguments.step_seconds,
        mfu=None if arguments.mfu is None else arguments.mfu / 100,
        tokens_per_step=None if arguments.global_batch is None else arguments.global_batch * mean,
        gpus=arguments.gpus,
        peak=peak,
    )


def _mtp_note(config: dict[str, Any], counted: int) -> list[str]:
    own = config.get("num_nextn_predict_layers") or 0
    if not own or counted:
        return []
    return [f"the checkpoint's {own} multi-token-prediction layer(s) are not counted; --mtp {own} counts them"]


def _as_dict(name: str, count: ModelFlops, lengths: list[int], speed: Speed | None) -> dict[str, Any]:
    tokens, pairs = sum(lengths), attended_pairs(lengths)
    total = training_flops(count, lengths)
    terms = [
        {
            "name": term.name,
            "gflop_per_token": term.training_flops(tokens, pairs) / tokens / 1e9,
            "share": term.training_flops(tokens, pairs) / total,
        }
        for term in count.terms
    ]
    return {
        "model": name,
        "sequences": len(lengths),
        "tokens": tokens,
        "mtp_layers": count.mtp_layers,
        "terms": terms,
        "gflop_per_token": total / tokens / 1e9,
        "speed": None if speed is None else asdict(speed),
    }


def _lines(answer: dict[str, Any]) -> list[str]:
    sequences, tokens = answer["sequences"], answer["tokens"]
    what = f"sequences of {tokens} tokens" if sequences == 1 else f"{sequences} sequences of {tokens} tokens in all"
    lines = [
        f"{answer['model']}, {what}: model FLOPs of forward and backward",
        "",
        "term                         GFLOP/token   share",
    ]
    lines += [f"{t['name']:28s} {t['gflop_per_token']:11.3f}  {t['share']:5.1%}" for t in answer["terms"]]
    lines += [f"{'total':28s} {answer['gflop_per_token']:11.3f}"]
    lines += ["", *(f"note: {text}" for text in answer["notes"])] if answer["notes"] else []
    speed = answer["speed"]
    if speed is not None:
        lines += ["", f"{speed['tflops']:,.1f} TFLOP/s/GPU = {speed['tokens_per_second']:,.0f} tokens/s/GPU"]
        if speed["step_seconds"] is not None:
            lines.append(f"{speed['step_seconds']:,.2f} s a step")
        if speed["mfu"] is not None:
            peak = answer["peak"]
            of = f"{peak['tflops']:g} TFLOP/s, dense {peak['precision']} on {peak['gpu']}"
            lines.append(f"{speed['mfu']:.1%} of the peak of {of} ({peak['source']})")
    return lines
