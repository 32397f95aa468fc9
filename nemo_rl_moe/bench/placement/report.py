"""The prediction as a table, the reasons in words, or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from nemo_rl_moe.bench.placement.measured import Check
from nemo_rl_moe.bench.placement.predict import Prediction, Split
from nemo_rl_moe.bench.placement.simulate import Outcome

# A side that idles less than this is as good as busy: neither side holds the other up.
_BUSY = 0.05
_ROWS = 20


def as_dict(name: str, workload: str, prediction: Prediction, checks: Sequence[Check]) -> dict[str, Any]:
    """The prediction as JSON data; times in seconds a step, idle as a share of the time."""
    best, unchanged = prediction.best, prediction.best_unchanged
    return {
        "recipe": name,
        "workload": workload,
        "batch": asdict(prediction.batch),
        "sync": asdict(prediction.sync),
        "splits": [asdict(split) for split in prediction.splits],
        "skipped_splits": prediction.skipped,
        "best_split": best and _devices(best.outcome),
        "best_split_unchanged": unchanged and _devices(unchanged.outcome),
        "why": why(prediction),
        "checks": [asdict(check) for check in checks],
    }


def lines(name: str, workload: str, prediction: Prediction, checks: Sequence[Check]) -> list[str]:
    """The prediction as text."""
    batch = prediction.batch
    updates = "while requests run" if batch.in_flight_updates else "when requests have ended"
    head = [
        f"{name}: {batch.prompts} prompts x {batch.group_size} responses a step on {batch.devices} devices, "
        f"age at most {batch.max_age}, weights updated {updates}",
        f"workload: {workload}",
        "",
        "policy:generation    step  = waits for    + log-   + train  + refit  + other    idle      idle    age        "
        "token/s",
        "                     time    generation   probs                                policy   gener.  mean  max  "
        "/device",
    ]
    table = [_row("sync", prediction.sync, "")]
    shown = _shown(prediction)
    table += [_row(_devices(split.outcome), split.outcome, _mark(prediction, split)) for split in shown]
    if len(shown) < len(prediction.splits):
        table.append(f"{len(prediction.splits) - len(shown)} slower splits that need other keys: see --json")
    if prediction.skipped:
        table.append(f"{prediction.skipped} splits between these were not simulated")
    text = [*head, *table, "", *why(prediction)]
    if checks:
        text += ["", "simulated against measured step time, each run at its own placement:"]
        text += [
            f"  {check.run}: measured {check.measured_step_s:.4g} s, simulated {check.simulated.step_s:.4g} s "
            f"({check.error:+.1%})"
            for check in checks
        ]
    return text


def _shown(prediction: Prediction) -> list[Split]:
    """The splits of the table: those that the recipe can take, and as many of the fastest others as fit."""
    fastest = sorted(prediction.splits, key=lambda split: (bool(split.changes), split.outcome.step_s))
    kept = [*fastest[:_ROWS], prediction.own, prediction.best]
    return [split for split in prediction.splits if any(split is one for one in kept)]


def why(prediction: Prediction) -> list[str]:
    """Which side holds a step up, where the difference to sync comes from, and which split is best."""
    best, unchanged, own = prediction.best, prediction.best_unchanged, prediction.own
    if best is None:
        return ["no split: trainer and generator need whole copies of the model on devices of their own"]
    explained = [best] if own is None else [own, best]
    text = [line for i, s in enumerate(explained) if s not in explained[:i] for line in _explain(prediction, s)]
    sync = prediction.sync.step_s
    speed = f"{_seconds(best.outcome.step_s)} a step, {_relation(best.outcome.step_s, sync)} sync"
    text.append(f"best split: {_devices(best.outcome)}, {speed}")
    if best.changes:
        text.append(f"  the recipe cannot take it as it is: {'; '.join(best.changes)}")
        if unchanged is None:
            text.append("  the recipe can take no split as it is")
        else:
            text.append(
                f"  best split it can take: {_devices(unchanged.outcome)}, {_seconds(unchanged.outcome.step_s)}, "
                f"{_relation(unchanged.outcome.step_s, sync)} sync"
            )
    if best.outcome.step_s >= sync:
        text.append("sync is the faster placement for this workload: no split of these devices beats it")
    return text


def _explain(prediction: Prediction, split: Split) -> list[str]:
    sync, out = prediction.sync, split.outcome
    hidden = sync.exposed_generation_s - out.exposed_generation_s
    slower = out.training_s + out.logprob_s - sync.training_s - sync.logprob_s
    refit = out.refit_s - sync.refit_s
    name = f"async {_devices(out)}" + (" (the recipe's)" if split.is_recipe else "")
    refit_text = f", refit {refit:+.4g} s" if abs(refit) > 1e-9 else ""
    return [
        f"{name} is {_relation(out.step_s, sync.step_s)} sync: {out.step_s - sync.step_s:+.4g} s a step",
        f"  training and log-probabilities {slower:+.4g} s on {out.policy_devices} of {prediction.batch.devices} "
        f"devices, waits for generation {-hidden:+.4g} s{refit_text}",
        f"  {_bottleneck(out)}",
    ]


def _bottleneck(out: Outcome) -> str:
    idle = f"training devices idle {out.policy_idle:.0%} of the time, generation devices {out.generation_idle:.0%}"
    waits = f"training waits {_seconds(out.exposed_generation_s)} a step for samples"
    exposed = out.exposed_generation_s / out.step_s
    if exposed > _BUSY and out.generation_idle > _BUSY:
        return f"bottleneck: both in turns, {waits}; {idle}"
    if exposed > _BUSY:
        return f"bottleneck: generation, {waits}; {idle}"
    if out.generation_idle > _BUSY:
        return f"bottleneck: training, generation is done before it is needed; {idle}"
    return f"balanced; {idle}"


def _mark(prediction: Prediction, split: Split) -> str:
    marks = ["the recipe's"] if split.is_recipe else []
    marks += ["best"] if split is prediction.best else []
    marks += ["best as it is"] if split is prediction.best_unchanged and split is not prediction.best else []
    marks += ["needs other keys"] if split.changes else []
    return "  " + ", ".join(marks) if marks else ""


def _row(name: str, out: Outcome, mark: str) -> str:
    numbers = (out.step_s, out.exposed_generation_s, out.logprob_s, out.training_s, out.refit_s, out.other_s)
    times = "{:9.4g}  {:12.4g}  {:7.4g}  {:7.4g}  {:7.4g}  {:7.4g}".format(*numbers)
    idle = f"{out.policy_idle:8.1%}  {out.generation_idle:8.1%}"
    return f"{name:16s}{times}  {idle}  {out.age_mean:4.2f}  {out.age_max:3d}  {out.tokens_per_sec_per_gpu:7.0f}{mark}"


def _devices(out: Outcome) -> str:
    return f"{out.policy_devices}:{out.generation_devices}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.4g} s"


def _relation(step_s: float, sync_s: float) -> str:
    change = step_s / sync_s - 1
    return f"{abs(change):.1%} {'slower' if change > 0 else 'faster'} than"
