"""`grpo` and `loss_fn`: the algorithm."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from nemo_rl_moe.recipe.schema.base import Section


class RewardShapingConfig(Section):
    """Soft penalty for overlong responses (DAPO, arXiv:2503.14476, equation 13)."""

    enabled: bool = False
    """Apply the penalty."""
    overlong_buffer_length: PositiveInt = 128
    """Tokens before the limit over which the penalty grows from 0 to its full value."""
    overlong_buffer_penalty: NonNegativeFloat = 1.0
    """Reward taken from a response at the limit."""
    max_response_length: PositiveInt | None = None
    """The limit in response tokens; null takes policy.generation.max_new_tokens."""


class RewardScalingConfig(Section):
    """Clamp rewards to the source range, then map it linearly to the target range."""

    enabled: bool = False
    """Apply the scaling."""
    source_min: float = 0.0
    """Lowest source reward."""
    source_max: float = 1.0
    """Highest source reward."""
    target_min: float = 0.0
    """Reward that source_min becomes."""
    target_max: float = 1.0
    """Reward that source_max becomes."""


class AsyncGrpoConfig(Section):
    """Generation ahead of training, on devices of its own."""

    enabled: bool = False
    """Generate while training; off generates and trains in turns."""
    max_trajectory_age_steps: NonNegativeInt = 1
    """Weight versions that a sample may be behind the step that trains on it."""
    in_flight_weight_updates: bool = False
    """Update weights while requests run; off waits for them."""
    recompute_kv_cache_after_weight_updates: bool = False
    """Drop the key/value cache of running requests at an update; off goes on with the old one."""
    running_requests: Literal["wait", "abort"] = "wait"
    """Without in_flight_weight_updates: an update waits for running requests, or ends them and starts them again."""
    request_routing: Literal["least_loaded", "round_robin"] = "least_loaded"
    """Which engine samples the next prompt: the one with the fewest responses under way, or each in turn."""
    max_generation_failures: NonNegativeInt = 0
    """Generation workers that may fail between two trained steps; each is replaced and its prompts sampled again."""


class GrpoConfig(Section):
    """`grpo`: batch, advantages, filtering and validation."""

    num_prompts_per_step: PositiveInt = 32
    """Prompts in one step."""
    num_generations_per_prompt: PositiveInt = 16
    """Responses sampled for each prompt (the group size)."""
    max_num_steps: PositiveInt = 1_000_000
    """Steps of the whole run, resumed ones included."""
    max_num_epochs: PositiveInt = 1
    """Passes over the training data at most."""
    normalize_rewards: bool = True
    """Divide advantages by the group's standard deviation."""
    use_leave_one_out_baseline: bool = True
    """Baseline of a sample is the mean reward of the others in its group; off takes the whole group's mean."""
    advantage_clip_low: float | None = None
    """Advantages are raised to at least this; null does not clip."""
    advantage_clip_high: float | None = None
    """Advantages are lowered to at most this; null does not clip."""
    overlong_filtering: bool = False
    """Leave samples that were cut at the length limit out of the loss."""
    use_dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal and sample further prompts in their place."""
    dynamic_sampling_max_gen_batches: PositiveInt = 10
    """Generation batches at most for one step of dynamic sampling."""
    async_grpo: AsyncGrpoConfig = Field(default_factory=AsyncGrpoConfig)
    """Placement in time: sync, or generation ahead."""
    reward_shaping: RewardShapingConfig = Field(default_factory=RewardShapingConfig)
    """Overlong penalty."""
    reward_scaling: RewardScalingConfig = Field(default_factory=RewardScalingConfig)
    """Linear map of rewards."""
    skip_reference_policy_logprobs_calculation: bool = False
    """Do not compute reference log-probabilities; needs loss_fn.reference_policy_kl_penalty 0."""
    token_mult_prob_error_warning: PositiveFloat = 1.1
    """Warn when the median of token_mult_prob_error over the last 20 steps is above this."""
    seq_logprob_error_threshold: PositiveFloat | None = None
    """Mask samples whose mean exp|generation - training log-probability| exceeds this; null masks none."""
    val_period: NonNegativeInt = 10
    """Steps between validations; 0 never validates."""
    val_at_start: bool = False
    """Validate before the first step (logged as step 0)."""
    val_at_end: bool = False
    """Validate after the last step."""
    max_val_samples: PositiveInt = 256
    """Validation prompts at most."""
    val_batch_size: PositiveInt = 256
    """Validation prompts given to the generator at once; the last batch may be smaller, none is dropped."""
    seed: NonNegativeInt = 42
    """Seed of data order, sampling and initialisation."""


class LossConfig(Section):
    """`loss_fn`: the clipped policy-gradient loss and its corrections."""

    reference_policy_kl_penalty: NonNegativeFloat = 0.01
    """Weight of the KL term against the frozen reference."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL term (http://joschu.net/blog/kl-approx.html)."""
    kl_input_clamp_value: PositiveFloat | None = 20.0
    """Log-ratios are clamped to plus or minus this before the estimator; null does not clamp."""
    kl_output_clamp_value: PositiveFloat | None = 10.0
    """Estimates are clamped to plus or minus this; null does not clamp."""
    ratio_clip_min: NonNegativeFloat = 0.2
    """Lower clip: ratios below 1 - this are clipped."""
    ratio_clip_max: NonNegativeFloat = 0.2
    """Upper clip: ratios above 1 + this are clipped (clip-higher when larger than the lower)."""
    ratio_clip_c: float | None = Field(None, gt=1)
    """Dual clip bound for negative advantages (arXiv:1912.09729); null is off."""
    token_level_loss: bool = True
    """True: mean over all tokens of the global batch. False: mean over samples of each sample's token mean."""
    sequence_level_importance_ratios: bool = False
    """One ratio for each sequence, its tokens' geometric mean (GSPO, arXiv:2507.18071); forbids token_level_loss."""
    force_on_policy_ratio: bool = False
    """Ratio 1 with the gradient of the current policy; needs one optimizer step for each rollout batch."""
    use_importance_sampling_correction: bool = False
    """Weight tokens by exp(training - generation log-probability), detached."""
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = None
    """How weights outside the bounds are treated: clamped, zeroed, or the sequence masked; null leaves them."""
    truncated_importance_sampling_ratio: PositiveFloat | None = None
    """Upper bound of the weight."""
    truncated_importance_sampling_ratio_min: PositiveFloat | None = None
    """Lower bound of the weight (icepop, seq-mask-tis)."""
