"""`data`, `env`, `logger`, `cluster` and `checkpointing`: what surrounds the algorithm."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from nemo_rl_moe.recipe.schema.base import Section


class DatasetConfig(Section):
    """One source of prompts."""

    dataset_name: Literal["reasoning_gym", "jsonl"]
    """Kind of data: tasks of the reasoning-gym library, or a JSONL file of problem and answer rows."""
    path: str | None = None
    """File of the rows (jsonl)."""
    problem_key: str = "problem"
    """Key of the problem text in each row (jsonl)."""
    answer_key: str = "answer"
    """Key of the answer in each row (jsonl)."""
    task: str | None = None
    """Task name (reasoning_gym), such as `basic_arithmetic`."""
    task_config: dict[str, Any] = Field(default_factory=dict)
    """Settings of the task (reasoning_gym)."""
    size: PositiveInt | None = None
    """Rows: how many the task makes (reasoning_gym), or the first ones taken (jsonl); null is 500, or all."""
    seed: NonNegativeInt = 0
    """Seed of the task's rows (reasoning_gym)."""
    env_name: str | None = None
    """Key under `env` of the environment that scores these rows; null takes data.default.env_name."""


class DataDefaults(Section):
    """What every dataset takes unless it says otherwise."""

    env_name: str | None = None
    """Key under `env` of the environment that scores the rows; null takes the only environment there is."""
    prompt_file: str | None = None
    """Text file with a `{}` where the problem goes; null sends the problem as it is."""
    system_prompt_file: str | None = None
    """Text file with the system prompt; null sends none."""


class DataConfig(Section):
    """`data`: where prompts come from."""

    max_input_seq_length: PositiveInt = 256
    """Prompt tokens at most; longer prompts are an error."""
    shuffle: bool = True
    """New order in each epoch, from grpo.seed."""
    train: DatasetConfig
    """Training prompts."""
    validation: DatasetConfig | None = None
    """Validation prompts; null never validates."""
    default: DataDefaults = Field(default_factory=DataDefaults)
    """Defaults of both."""


class EnvConfig(Section):
    """One environment: a verifier in a pool of processes that can be killed."""

    verifier: str
    """`math_verify`, `reasoning_gym`, or the import path `package.module:function` of a user's own."""
    num_workers: PositiveInt = 1
    """Verifier processes."""
    timeout_s: PositiveFloat = 10.0
    """Seconds for one sample; past them its process is killed and the sample scores 0."""
    start_timeout_s: PositiveFloat = 120.0
    """Seconds for the import of the verifier, with all that its module loads."""
    on_error: Literal["zero", "fail"] = "zero"
    """A verifier that raises: score 0 and count it, or end the run naming the sample."""


class WandbConfig(Section):
    """Weights & Biases."""

    entity: str | None = None
    """User or team that the project belongs to; null is the account's own."""
    project: str = "nemo-rl-moe"
    """Project name."""
    name: str | None = None
    """Run name; null takes the run directory's name."""
    mode: Literal["online", "offline"] = "online"
    """offline writes files for a later `wandb sync`."""
    init_timeout_s: PositiveFloat = 60.0
    """Seconds for the server's answer at the start; without one the run writes offline files."""
    finish_timeout_s: PositiveFloat = 120.0
    """Seconds for what is left to upload at the end; the rest stays in files for a later `wandb sync`."""


class LoggerConfig(Section):
    """`logger`: run directory and trackers."""

    log_dir: str | None = None
    """Run directory; null is runs/<recipe stem>."""
    wandb_enabled: bool = False
    """Log to Weights & Biases."""
    tensorboard_enabled: bool = False
    """Write TensorBoard events under the run directory."""
    num_rollout_samples: NonNegativeInt = 4
    """Samples written to rollouts/step_<n>.jsonl at each step."""
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    """Weights & Biases settings."""


class TimeoutsConfig(Section):
    """Seconds after which a phase that does not answer is an error naming it."""

    setup_s: PositiveFloat = 600.0
    """Start of all workers, model loading included."""
    generation_s: PositiveFloat = 3600.0
    """One generation call."""
    logprob_s: PositiveFloat = 3600.0
    """One log-probability pass."""
    train_s: PositiveFloat = 3600.0
    """One training call."""
    refit_s: PositiveFloat = 600.0
    """One weight update, both sides."""
    checkpoint_s: PositiveFloat = 1800.0
    """One checkpoint."""


class ClusterConfig(Section):
    """`cluster`: the devices of the run."""

    device: Literal["cuda", "cpu"] = "cuda"
    """What a device is: one GPU, or cpus_per_device CPU cores."""
    gpu_type: Literal["h100", "h200", "b200", "gb200", "gb300", "gh200"] | None = None
    """The GPU, which fixes the NVLink domain that HybridEP's topology is checked against; null checks less."""
    gpu_memory_gib: PositiveFloat | None = None
    """Memory of one GPU that a process can use, in GiB; null takes that of gpu_type (GH200: the 96 GB part)."""
    gpus_per_node: PositiveInt = 8
    """Devices on each node (GPUs, or CPU devices)."""
    num_nodes: PositiveInt = 1
    """Nodes."""
    cpus_per_device: PositiveInt = 1
    """Cores and threads of one CPU device (device cpu)."""
    oversubscribe_cpus: bool = False
    """Let CPU devices share cores: a Ray that the run starts is told of as many as the devices need (device cpu)."""
    segment_size: PositiveInt | None = None
    """Nodes of one NVLink-domain segment; null ignores topology."""
    placement_timeout_s: NonNegativeFloat = 60.0
    """Seconds to wait for the cluster's resources."""
    timeouts: TimeoutsConfig = Field(default_factory=TimeoutsConfig)
    """Time limits of the phases."""


class SweepConfig(Section):
    """`benchmark.sweep`: the recipes that `bench sweep` makes of this one."""

    axes: dict[str, list[Any]] = Field(min_length=1)
    """Values by axis: tp, pp, vpp, cp, ep, etp, mbs, gbs, nodes, recompute, precision, dispatcher, sms, overlap,
    graphs, moments, or any dotted key of the recipe."""
    combine: Literal["product", "single", "pairs"] = "product"
    """Points: every combination, one axis at a time around this recipe, or two axes at a time."""
    timeout_s: PositiveFloat = 3600.0
    """Seconds after which a point that has not ended is ended as hung."""


class BenchmarkConfig(Section):
    """`benchmark`: what `bench` does with the recipe."""

    policy_only: bool = False
    """The recipe is for `bench` alone: the policy trains on synthetic batches, and nothing is generated."""
    steps: PositiveInt = 20
    """Steps of `bench train`, warm-up included."""
    warmup_steps: NonNegativeInt = 5
    """First steps that its results leave out."""
    system: str | None = None
    """Machine of bench's table whose links and power predictions take; null is the usual one of cluster.gpu_type."""
    sweep: SweepConfig | None = None
    """Axes of `bench sweep`; null is no sweep."""


class CheckpointingConfig(Section):
    """`checkpointing`: when and what is saved."""

    enabled: bool = False
    """Save checkpoints."""
    checkpoint_dir: str | None = None
    """Folder of the checkpoints; null is <run directory>/checkpoints."""
    save_period: PositiveInt = 10
    """Steps between checkpoints."""
    keep_top_k: PositiveInt | None = 3
    """Checkpoints kept, best metric first; null keeps all."""
    metric_name: str | None = None
    """Metric that ranks checkpoints, such as `validation/accuracy`; null keeps the newest."""
    save_hf: bool = True
    """Also write the model as a Hugging Face folder, step_<n>/hf, which transformers and vLLM load."""
    higher_is_better: bool = True
    """Whether a larger metric is better."""
