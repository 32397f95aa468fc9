"""Rules on router replay."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_rl_moe.recipe.rules.registry import Context, Finding, rule

REPLAY, ENABLED, SOURCE = (f"policy.router_replay{suffix}" for suffix in ("", ".enabled", ".source"))


@rule("router replay", "To replay takes a model with experts, a pass that records them, and a router that looks.")
def replay_is_possible(context: Context) -> Iterator[Finding]:
    replay = context.recipe.policy.router_replay
    if not replay.enabled:
        for key in ("source", "measure_only"):
            if getattr(replay, key) != type(replay).model_fields[key].default:
                yield Finding((f"{REPLAY}.{key}", ENABLED), "has no effect while router_replay.enabled is false")
        return
    if context.model is not None and not context.model.is_moe:
        yield Finding((ENABLED,), "true, but the model is dense: expected false")
        return
    if context.recipe.benchmark.policy_only:
        yield Finding((ENABLED, "benchmark.policy_only"), "true in a benchmark, where no pass records, expected false")
    elif replay.source == "logprob":
        yield from _a_pass_records(context)
    graphs = context.recipe.policy.megatron_cfg.cuda_graph_impl
    if graphs != "none":
        message = f"true with cuda_graph_impl {graphs}: a captured router replays nothing, expected none"
        yield Finding((ENABLED, "policy.megatron_cfg.cuda_graph_impl"), message)


def _a_pass_records(context: Context) -> Iterator[Finding]:
    """The pass of log-probabilities before the update is left out where nothing needs it (`loops/step.py`)."""
    recipe = context.recipe
    if recipe.loss_fn.force_on_policy_ratio and recipe.grpo.seq_logprob_error_threshold is None:
        message = "logprob with force_on_policy_ratio, which leaves that pass out: expected force_on_policy_ratio false"
        yield Finding((SOURCE, "loss_fn.force_on_policy_ratio"), message)
