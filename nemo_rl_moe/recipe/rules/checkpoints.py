"""Rules on what ranks checkpoints.

One without the metric ranks last: where no checkpoint has it, "the best k" would become "the newest k" without a word.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from nemo_rl_moe.recipe.rules.registry import Context, Finding, rule
from nemo_rl_moe.recipe.scoring import environment_name
from nemo_rl_moe.tracking.definitions import METRICS, find

METRIC, SAVE, VALIDATE = "checkpointing.metric_name", "checkpointing.save_period", "grpo.val_period"
STEPS, AT_END = "grpo.max_num_steps", "grpo.val_at_end"


@rule("checkpoint metric", "Checkpoints are ranked by a metric that the run logs at every step that saves one.")
def checkpoint_metric_exists(context: Context) -> Iterator[Finding]:
    cfg = context.recipe.checkpointing
    if cfg.metric_name is None:
        return
    prefix, _, name = cfg.metric_name.partition("/")
    if prefix not in ("train", "validation") or not name:
        message = f"{cfg.metric_name!r}: expected train/<metric> or validation/<metric>, such as validation/accuracy"
        yield Finding((METRIC,), message)
    elif find(cfg.metric_name) is None:
        near = difflib.get_close_matches(cfg.metric_name, [metric.name for metric in METRICS], 1)
        yield Finding((METRIC,), f"{cfg.metric_name}: no such metric" + (f"; did you mean {near[0]}?" if near else ""))
    elif cfg.enabled and prefix == "validation":
        yield from _validation_metric(context, cfg.metric_name, name)
    elif cfg.enabled and name.startswith("dynamic_sampling_") and not context.recipe.grpo.use_dynamic_sampling:
        message = f"{cfg.metric_name} is never logged: use_dynamic_sampling is false"
        yield Finding((METRIC, "grpo.use_dynamic_sampling"), message)


def _validation_metric(context: Context, metric: str, name: str) -> Iterator[Finding]:
    data = context.recipe.data
    if data.validation is None:
        yield Finding((METRIC, "data.validation"), f"{metric} is never logged: data.validation is null")
        return
    env = environment_name(context.recipe, data.validation)
    family, _, suffix = name.partition("/")
    if suffix and env is not None and suffix != env:
        message = f"{metric} is never logged: {env} scores data.validation, expected validation/{family}/{env}"
        yield Finding((METRIC, "data.validation.env_name", "data.default.env_name"), message)
        return
    yield from _unvalidated(context, metric)


def _unvalidated(context: Context, metric: str) -> Iterator[Finding]:
    """Steps that save without validating. The last step saves too; `val_period` 0 validates at the end at most."""
    grpo, save = context.recipe.grpo, context.recipe.checkpointing.save_period
    every, last, keys = grpo.val_period, grpo.max_num_steps, (METRIC, VALIDATE, SAVE, AT_END, STEPS)
    if every == 0 and not grpo.val_at_end:
        yield Finding(keys, f"{metric} is never logged: val_period is 0 and val_at_end false")
    elif save < last and (every == 0 or save % every):
        period = f"every {every} steps" if every else "at the end only"
        message = (
            f"checkpoints are saved every {save} steps and validated {period}: that of step {save} has no {metric}"
        )
        yield Finding(keys, f"{message}, and would rank last; expected save_period a multiple of val_period")
    elif every and last % every and not grpo.val_at_end:
        message = (
            f"the checkpoint of the last step, {last}, is saved without validation, which comes every {every} steps"
        )
        yield Finding(keys, f"{message}: it has no {metric}; val_at_end gives it one", "note")
