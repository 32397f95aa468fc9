"""Rules on batch sizes and lengths."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_rl_moe.recipe.placement import model_parallel_size, split_devices
from nemo_rl_moe.recipe.rules.registry import Context, Finding, rule

PROMPTS, GENERATIONS = "grpo.num_prompts_per_step", "grpo.num_generations_per_prompt"
GLOBAL, MICRO, LOGPROB = "policy.train_global_batch_size", "policy.train_micro_batch_size", "policy.logprob_batch_size"
LENGTH, DIVISIBLE = "policy.max_total_sequence_length", "policy.make_sequence_length_divisible_by"
NEW_TOKENS, MODEL_LEN = "policy.generation.max_new_tokens", "policy.generation.vllm_cfg.max_model_len"
INPUT = "data.max_input_seq_length"
PACKING = "policy.sequence_packing"


def dp_size(context: Context) -> int | None:
    """Data-parallel size; None when the world size rule is broken or a split leaves the trainer no device."""
    world, size = len(split_devices(context.recipe).policy), model_parallel_size(context.recipe)
    return None if world % size else world // size or None


@rule("train batch", "A step's samples are cut into whole optimizer steps; a rest would never be trained on.")
def samples_divide(context: Context) -> Iterator[Finding]:
    grpo, batch = context.recipe.grpo, context.recipe.policy.train_global_batch_size
    samples = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    if samples % batch and not context.recipe.benchmark.policy_only:
        text = f"{grpo.num_prompts_per_step} prompts x {grpo.num_generations_per_prompt} generations = {samples}"
        yield Finding((GLOBAL, PROMPTS, GENERATIONS), f"{text} samples are not a multiple of the train batch {batch}")


@rule("data-parallel batch", "Each data-parallel rank takes the same number of samples of the train batch.")
def batch_divides_over_ranks(context: Context) -> Iterator[Finding]:
    dp, batch = dp_size(context), context.recipe.policy.train_global_batch_size
    if dp and batch % dp:
        yield Finding((GLOBAL, "cluster.num_nodes", "cluster.gpus_per_node"), f"{batch} is not a multiple of DP {dp}")


@rule("micro-batch", "Without packing, a rank's samples are cut into whole micro-batches.")
def microbatch_divides(context: Context) -> Iterator[Finding]:
    policy, dp = context.recipe.policy, dp_size(context)
    if policy.sequence_packing.enabled or not dp or policy.train_global_batch_size % dp:
        return
    own = policy.train_global_batch_size // dp
    if own % policy.train_micro_batch_size:
        message = f"{own} samples on each rank are not a multiple of the micro-batch {policy.train_micro_batch_size}"
        yield Finding((MICRO, GLOBAL), message)


@rule("logprob batch", "Without packing, a rank's samples of a step are cut into whole log-probability micro-batches.")
def logprob_batch_divides(context: Context) -> Iterator[Finding]:
    policy, grpo, dp = context.recipe.policy, context.recipe.grpo, dp_size(context)
    samples = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    if policy.sequence_packing.enabled or not dp or samples % dp or context.recipe.benchmark.policy_only:
        return
    if samples // dp % policy.logprob_batch_size:
        message = f"{samples // dp} samples of a step on each rank are not a multiple of {policy.logprob_batch_size}"
        yield Finding((LOGPROB, PROMPTS, GENERATIONS), message)


@rule("on-policy ratio", "A ratio fixed at 1 is only right for the one optimizer step that the weights sampled for.")
def on_policy_needs_one_step(context: Context) -> Iterator[Finding]:
    grpo, batch = context.recipe.grpo, context.recipe.policy.train_global_batch_size
    samples = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    if context.recipe.benchmark.policy_only:
        return
    if context.recipe.loss_fn.force_on_policy_ratio and samples % batch == 0 and samples != batch:
        message = f"force_on_policy_ratio needs one optimizer step: {samples} samples a step, train batch {batch}"
        yield Finding(("loss_fn.force_on_policy_ratio", GLOBAL, PROMPTS, GENERATIONS), message)


@rule("sequence length", "What the engine can return must fit the trainer's rows; a prompt must leave room to answer.")
def lengths_fit(context: Context) -> Iterator[Finding]:
    policy, generation = context.recipe.policy, context.recipe.policy.generation
    prompt, response, total = (
        context.recipe.data.max_input_seq_length,
        generation.max_new_tokens,
        policy.max_total_sequence_length,
    )
    engine = generation.vllm_cfg.max_model_len or total
    if response > total:
        yield Finding(
            (NEW_TOKENS, LENGTH), f"{response} response tokens are more than max_total_sequence_length {total}"
        )
    elif prompt >= total:
        yield Finding((INPUT, LENGTH), f"{prompt} prompt tokens leave no room for a response in {total}")
    elif engine < total:
        message = f"the engine accepts {engine} tokens, fewer than max_total_sequence_length {total}"
        yield Finding((MODEL_LEN, LENGTH), message)
    elif min(prompt + response, engine) > total:
        message = (
            f"prompt {prompt} + response {response} tokens, engine limit {engine}: more than {total} can be returned"
        )
        yield Finding((MODEL_LEN, NEW_TOKENS, INPUT, LENGTH), message)
    elif prompt + response > total and not context.recipe.benchmark.policy_only:
        message = f"after the longest prompt ({prompt}) a response is cut at {total - prompt} of {response} tokens"
        yield Finding((NEW_TOKENS, INPUT, LENGTH), message, "note")
    positions = context.model.max_positions if context.model else None
    if positions is not None and total > positions:
        yield Finding((LENGTH, "policy.model_name"), f"{total} tokens, but the model's positions end at {positions}")


@rule("divisible length", "Sequence parallelism cuts each row in TP pieces, context parallelism in 2 x CP.")
def lengths_divide(context: Context) -> Iterator[Finding]:
    policy, megatron = context.recipe.policy, context.recipe.policy.megatron_cfg
    tp = megatron.tensor_model_parallel_size if megatron.sequence_parallel else 1
    cp = 2 * megatron.context_parallel_size if megatron.context_parallel_size > 1 else 1
    divisor = tp * cp
    if policy.make_sequence_length_divisible_by % divisor:
        message = f"{policy.make_sequence_length_divisible_by} is not a multiple of {divisor} (TP {tp} x 2CP {cp})"
        yield Finding((DIVISIBLE, "policy.megatron_cfg.tensor_model_parallel_size"), message)
    elif policy.max_total_sequence_length % policy.make_sequence_length_divisible_by:
        message = f"{policy.max_total_sequence_length} is not a multiple of {policy.make_sequence_length_divisible_by}"
        yield Finding((LENGTH, DIVISIBLE), message)


@rule("packing budget", "A packed micro-batch must be able to hold the longest sequence.")
def budgets_hold_a_sequence(context: Context) -> Iterator[Finding]:
    policy = context.recipe.policy
    packing, length = policy.sequence_packing, policy.max_total_sequence_length
    for name in ("train_mb_tokens", "logprob_mb_tokens"):
        budget = getattr(packing, name)
        if packing.enabled and budget is not None and budget < length:
            message = f"{budget} tokens are fewer than max_total_sequence_length {length}"
            yield Finding((f"{PACKING}.{name}", LENGTH), message)


@rule("packing keys", "Keys of packed rows do nothing where each sequence has a row of its own.")
def packing_keys_need_packing(context: Context) -> Iterator[Finding]:
    packing = context.recipe.policy.sequence_packing
    if packing.enabled:
        return
    for name in ("train_mb_tokens", "logprob_mb_tokens", "fuse_loss", "microbatch_order"):
        if getattr(packing, name) != type(packing).model_fields[name].default:
            yield Finding((f"{PACKING}.{name}", f"{PACKING}.enabled"), "has no effect without sequence packing")


@rule("shared prompts", "Only packed rows can hold a prompt once for several responses.")
def shared_prompts_are_packed(context: Context) -> Iterator[Finding]:
    packing = context.recipe.policy.sequence_packing
    if packing.share_prompts and not packing.enabled:
        yield Finding((f"{PACKING}.share_prompts", f"{PACKING}.enabled"), "expected enabled true")


@rule("validation size", "Every sample is scored; where the last batch is rounded away, accuracies are not comparable.")
def validation_is_whole(context: Context) -> Iterator[Finding]:
    samples, batch = context.recipe.grpo.max_val_samples, context.recipe.grpo.val_batch_size
    rest = samples % batch
    if context.recipe.data.validation is not None and 0 < rest < samples:
        message = (
            f"{samples} samples in batches of {batch}: the last has {rest}; rounding down would score {samples - rest}"
        )
        yield Finding(("grpo.max_val_samples", "grpo.val_batch_size"), message, "note")
