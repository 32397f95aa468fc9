"""Rules on the loss, data and environments."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from nemo_rl_moe.recipe.rules.registry import Context, Finding, rule
from nemo_rl_moe.recipe.scoring import environment_name

LOSS = "loss_fn"
RATIO_BOUNDS = (f"{LOSS}.truncated_importance_sampling_ratio", f"{LOSS}.truncated_importance_sampling_ratio_min")


@rule("sequence ratios", "A sequence's one ratio is averaged over sequences; a token mean would weight it by length.")
def sequence_ratios_need_sequence_loss(context: Context) -> Iterator[Finding]:
    loss = context.recipe.loss_fn
    if loss.sequence_level_importance_ratios and loss.token_level_loss:
        message = "sequence_level_importance_ratios with token_level_loss true, expected token_level_loss false"
        yield Finding((f"{LOSS}.sequence_level_importance_ratios", f"{LOSS}.token_level_loss"), message)


@rule("reference", "Without reference log-probabilities there is nothing to take the KL term against.")
def no_kl_without_reference(context: Context) -> Iterator[Finding]:
    penalty = context.recipe.loss_fn.reference_policy_kl_penalty
    if context.recipe.grpo.skip_reference_policy_logprobs_calculation and penalty:
        message = f"the reference is skipped, but reference_policy_kl_penalty is {penalty:g}, expected 0"
        yield Finding(
            ("grpo.skip_reference_policy_logprobs_calculation", f"{LOSS}.reference_policy_kl_penalty"), message
        )


@rule("importance correction", "Bounds without the correction do nothing; a type without its bounds is undefined.")
def importance_keys_agree(context: Context) -> Iterator[Finding]:
    loss = context.recipe.loss_fn
    kind, high, low = (
        loss.truncated_importance_sampling_type,
        loss.truncated_importance_sampling_ratio,
        loss.truncated_importance_sampling_ratio_min,
    )
    switch, type_key = f"{LOSS}.use_importance_sampling_correction", f"{LOSS}.truncated_importance_sampling_type"
    if not loss.use_importance_sampling_correction and (kind or high or low):
        set_keys = [key for key, value in ((type_key, kind), *zip(RATIO_BOUNDS, (high, low), strict=True)) if value]
        yield Finding((*set_keys, switch), "has no effect while use_importance_sampling_correction is false")
        return
    if kind is None and (high or low):
        yield Finding((RATIO_BOUNDS[0] if high else RATIO_BOUNDS[1], type_key), "has no effect without a type")
    elif kind and high is None:
        yield Finding((type_key, RATIO_BOUNDS[0]), f"{kind} needs truncated_importance_sampling_ratio")
    elif kind in ("icepop", "seq-mask-tis") and low is None:
        yield Finding((type_key, RATIO_BOUNDS[1]), f"{kind} needs truncated_importance_sampling_ratio_min")
    elif kind == "tis" and low is not None:
        yield Finding((RATIO_BOUNDS[1], type_key), "has no effect with type tis, which only bounds from above")
    elif low is not None:
        assert high is not None, "both bounds without a type, and a type without this one, were refused above"
        if low > high:
            message = f"the lower bound {low:g} is above the upper bound {high:g}"
            yield Finding((RATIO_BOUNDS[1], RATIO_BOUNDS[0]), message)


@rule("advantage clip", "A lower bound above the upper one leaves no value.")
def advantage_bounds_ordered(context: Context) -> Iterator[Finding]:
    low, high = context.recipe.grpo.advantage_clip_low, context.recipe.grpo.advantage_clip_high
    if low is not None and high is not None and low > high:
        yield Finding(
            ("grpo.advantage_clip_low", "grpo.advantage_clip_high"), f"{low:g} is above the high bound {high:g}"
        )


@rule("reward scaling", "The source range is divided by its width.")
def reward_range_has_width(context: Context) -> Iterator[Finding]:
    scaling = context.recipe.grpo.reward_scaling
    if scaling.enabled and scaling.source_min >= scaling.source_max:
        message = f"source_min {scaling.source_min:g} is not below source_max {scaling.source_max:g}"
        yield Finding(("grpo.reward_scaling.source_min", "grpo.reward_scaling.source_max"), message)


@rule("overlong penalty", "The penalty grows over the last tokens of a response, which must be that long.")
def overlong_buffer_fits(context: Context) -> Iterator[Finding]:
    shaping = context.recipe.grpo.reward_shaping
    limit = shaping.max_response_length or context.recipe.policy.generation.max_new_tokens
    if shaping.enabled and shaping.overlong_buffer_length > limit:
        keys = ("grpo.reward_shaping.overlong_buffer_length", "grpo.reward_shaping.max_response_length")
        yield Finding(keys, f"{shaping.overlong_buffer_length} tokens, but responses end at {limit}")


@rule("group size", "A group's advantages compare its samples; one sample alone has nothing to be compared with.")
def groups_compare(context: Context) -> Iterator[Finding]:
    grpo = context.recipe.grpo
    if grpo.num_generations_per_prompt == 1:
        keys = ("grpo.num_generations_per_prompt", "grpo.use_dynamic_sampling", "grpo.use_leave_one_out_baseline")
        yield Finding(keys, "every advantage of a group of one is 0, expected 2 or more")


@rule("environment", "Every prompt needs one environment that scores its responses.")
def environments_exist(context: Context) -> Iterator[Finding]:
    data, names = context.recipe.data, sorted(context.recipe.env)
    if not names:
        yield Finding(("env",), "no environment, expected one that scores the responses")
        return
    used = [("data.default", data.default.env_name)]
    for name in ("train", "validation"):
        dataset = getattr(data, name)
        if dataset is None:
            continue
        used.append((f"data.{name}", dataset.env_name))
        if environment_name(context.recipe, dataset) is None:
            message = f"no environment, expected one of {names} here or in data.default"
            yield Finding((f"data.{name}.env_name", "data.default.env_name"), message)
    for section, used_name in used:
        if used_name is not None and used_name not in names:
            near = difflib.get_close_matches(used_name, names, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield Finding(
                (f"{section}.env_name", "env"), f"{used_name!r} is no environment, expected one of {names}{hint}"
            )


@rule("dataset", "Each kind of data needs its source.")
def datasets_have_sources(context: Context) -> Iterator[Finding]:
    for name in ("train", "validation"):
        dataset = getattr(context.recipe.data, name)
        if dataset is None:
            continue
        needed, other = ("path", "task") if dataset.dataset_name == "jsonl" else ("task", "path")
        if getattr(dataset, needed) is None:
            message = f"dataset_name {dataset.dataset_name} needs {needed}"
            yield Finding((f"data.{name}.{needed}", f"data.{name}.dataset_name"), message)
        if getattr(dataset, other) is not None:
            yield Finding((f"data.{name}.{other}",), f"has no effect with dataset_name {dataset.dataset_name}")
