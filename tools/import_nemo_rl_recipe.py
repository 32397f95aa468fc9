"""Converts a NeMo-RL GRPO recipe (Megatron policy, vLLM generation): `python tools/import_nemo_rl_recipe.py IN.yaml`.

Prints the recipe on stdout and, on stderr, everything that was dropped, changed or guessed, each with its line and the
reason; then what `validate` still finds. Nothing is dropped silently. Interpolations are replaced by their values.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

REPO = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from nemo_rl_moe.errors import UserError  # noqa: E402
from nemo_rl_moe.recipe.commands import to_yaml  # noqa: E402
from nemo_rl_moe.recipe.compose import compose  # noqa: E402
from nemo_rl_moe.recipe.interpolation import resolve  # noqa: E402
from nemo_rl_moe.recipe.load import load_recipe  # noqa: E402
from nemo_rl_moe.recipe.schema import Recipe  # noqa: E402
from nemo_rl_moe.recipe.schema_walk import annotation_at, optional  # noqa: E402
from nemo_rl_moe.recipe.source import (  # noqa: E402
    Node,
    Path,
    Problem,
    RecipeError,
    dotted,
    find,
    shown,
    split_dotted,
)

# Sections and keys without a counterpart, with the reason; the longest match counts.
DROPPED: dict[str, str] = {
    "policy.dtensor_cfg": "only the Megatron trainer exists here",
    "policy.optimizer": "the Megatron trainer's optimizer is policy.megatron_cfg.optimizer",
    "policy.scheduler": "the Megatron trainer's schedule is policy.megatron_cfg.scheduler",
    "policy.dynamic_batching": "sequence packing takes its place",
    "policy.draft": "draft models are not trained here",
    "policy.generation_batch_size": "vLLM batches by itself",
    "policy.megatron_cfg.checkpoint": "checkpoints are written before a step ends",
    "policy.megatron_cfg.peft": "adapters are not trained here",
    "policy.megatron_cfg.pipeline_dtype": "always policy.precision",
    "policy.megatron_cfg.converter_type": "the model family is read from config.json",
    "policy.megatron_cfg.optimizer.clip_grad": "policy.max_grad_norm clips",
    "policy.megatron_cfg.optimizer.bf16": "policy.precision decides",
    "policy.megatron_cfg.optimizer.fp16": "policy.precision decides",
    "policy.megatron_cfg.optimizer.params_dtype": "policy.precision decides",
    "policy.sequence_packing.sequence_length_round": "policy.make_sequence_length_divisible_by rounds",
    "policy.sequence_packing.algorithm": "packing is first-fit decreasing",
    "policy.generation.mcore_generation_config": "generation is vLLM's",
    "policy.generation.port_range_low": "the operating system chooses free ports",
    "policy.generation.port_range_high": "the operating system chooses free ports",
    "policy.generation.vllm_cfg.enable_vllm_metrics_logger": "not logged",
    "policy.generation.vllm_cfg.vllm_metrics_logger_interval": "not logged",
    "policy.generation.refit_cfg": "refit has one transport for each placement",
    "policy.generation.refit_transport": "refit has one transport for each placement",
    "cluster.master_port_range_low": "the operating system chooses free ports",
    "cluster.master_port_range_high": "the operating system chooses free ports",
    "data.num_workers": "prompts are tokenized before the run",
    "data_plane": "tensors go through Ray",
    "logger.gpu_monitoring": "GPUs are not sampled",
    "logger.monitor_gpus": "GPUs are not sampled",
    "logger.mlflow": "trackers are Weights & Biases and TensorBoard",
    "logger.mlflow_enabled": "trackers are Weights & Biases and TensorBoard",
    "logger.swanlab": "trackers are Weights & Biases and TensorBoard",
    "logger.swanlab_enabled": "trackers are Weights & Biases and TensorBoard",
    "logger.tensorboard": "events are written under the run directory",
    "logger.log_dir": "runs are named after their file",
    "logger.wandb.name": "runs are named after their file",
    "checkpointing.checkpoint_dir": "checkpoints are in the run directory",
    "on_policy_distillation": "not a GRPO setting",
    "reward_penalties": "not available",
}
RENAMED = {
    "logger.num_val_samples_to_print": "logger.num_rollout_samples",
    "policy.generation.vllm_cfg.quantization_ignored_layer_kws": (
        "policy.generation.vllm_cfg.quantization_ignore_patterns"
    ),
}
# A vLLM or Megatron setting that is off there says nothing, so it is dropped without a word.
OFF = (None, False, {}, [], "none", 0)
GPU_OF_NODE = {4: "gb200", 8: "h100"}


@dataclass
class Conversion:
    """The recipe built so far, and what a reader must know about it."""

    recipe: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def put(self, path: Path, value: Any) -> None:
        """Sets the value at a path."""
        *parents, last = path
        node: dict[Any, Any] = self.recipe
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value

    def note(self, node: Node, text: str) -> None:
        """Notes something about a line of the input."""
        self.notes.append(f"{node.source}: {text}")


def convert(path: pathlib.Path) -> Conversion:
    """Converts a recipe and everything it inherits.

    Raises:
        UserError: not a GRPO recipe of a Megatron policy with vLLM generation, or one that cannot be composed.
    """
    problems: list[Problem] = []
    root = resolve(compose(path).root, problems)
    problems += _odd_sections(root)
    if problems:
        raise RecipeError(problems)
    _refuse_other_kinds(root)
    result = Conversion()
    for key, node in _values(root):
        owner = next((prefix for prefix in SPECIAL if key[: len(prefix)] == prefix), None)
        if owner is not None:
            SPECIAL[owner](result, key, node)
        elif (reason := _dropped(key)) is not None:
            result.note(node, f"dropped {dotted(key)}: {reason}")
        else:
            _copy(result, key, node, node.plain())
    _cluster(result, root)
    return result


def _odd_sections(root: Node) -> list[Problem]:
    """Sections that are a list or a scalar; null is an empty one, as in every recipe."""
    assert isinstance(root.value, dict)
    return [
        Problem("type", name, node.source, node.plain(), f"found {shown(node.plain())}, expected a map")
        for name, node in root.value.items()
        if name in Recipe.model_fields and node.value is not None and not isinstance(node.value, dict)
    ]


def _values(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Every scalar, list and empty map with its path. A key may itself hold dots, so paths are not joined to text."""
    if isinstance(node.value, dict) and node.value:
        for name, item in node.value.items():
            yield from _values(item, (*path, name))
    elif path:
        yield path, node


def _refuse_other_kinds(root: Node) -> None:
    def value(key: str) -> Any:
        node = find(root, split_dotted(key))
        return None if node is None else node.plain()

    if value("grpo") is None:
        raise UserError(f"{root.source.file}: no grpo section, expected a GRPO recipe")
    if value("policy.megatron_cfg.enabled") is not True:
        raise UserError(f"{root.source.file}: policy.megatron_cfg.enabled is not true, expected a Megatron policy")
    backend = value("policy.generation.backend")
    if backend != "vllm":
        raise UserError(f"{root.source.file}: policy.generation.backend is {shown(backend)}, expected vllm")


def _dropped(path: Path) -> str | None:
    matches = [key for key in DROPPED if path[: key.count(".") + 1] == split_dotted(key)]
    return DROPPED[max(matches, key=len)] if matches else None


def _copy(result: Conversion, path: Path, node: Node, value: Any) -> None:
    """Copies a value whose key the schema has."""
    key = dotted(path)
    if key in RENAMED:
        path = split_dotted(RENAMED[key])
        result.note(node, f"renamed {key} to {RENAMED[key]}")
    annotation = annotation_at(path)
    if annotation is None:
        if value not in OFF:
            result.note(node, f"dropped {key} = {shown(value)}: there is no such key")
    elif value is None and not optional(annotation):
        result.note(node, f"dropped {key} = null: the default counts")
    else:
        result.put(path, value)


def _metric(result: Conversion, path: Path, node: Node) -> None:
    kind, _, name = str(node.value).partition(":")
    prefix = {"val": "validation", "train": "train"}.get(kind)
    if not isinstance(node.value, str) or prefix is None or len(path) > 2:
        shape = "expected val:<metric> or train:<metric>"
        result.note(node, f"dropped {dotted(path)} = {shown(node.plain())}: {shape}")
        return
    result.put(path, f"{prefix}/{name}")
    result.note(node, f"changed {dotted(path)}: {node.value} is {prefix}/{name}")


def _dataset(result: Conversion, path: Path, node: Node) -> None:
    """NeMo-RL names data sets of the hub; here rows are in a file."""
    _, side, *rest = path
    if rest == ["dataset_name"] and isinstance(node.value, str):
        result.put(("data", side, "dataset_name"), "jsonl")
        result.put(("data", side, "path"), f"data/{node.value}/{side}.jsonl")
        result.note(
            node, f"changed {dotted(path)}: {node.value} becomes data/{node.value}/{side}.jsonl, which you write"
        )
    elif not rest and node.value is None:
        result.put(path, None)
    elif not rest:
        result.note(node, f"dropped {dotted(path)} = {shown(node.plain())}: expected one data set, with dataset_name")
    elif rest == ["env_name"]:
        result.put(path, node.plain())
    else:
        result.note(node, f"dropped {dotted(path)}: rows are in a file")


def _environment(result: Conversion, path: Path, node: Node) -> None:
    if len(path) == 1:
        result.put(path, {})
        result.note(node, "env names no environment, expected one that scores the responses")
        return
    _, name, *rest = path
    if name not in result.recipe.get("env", {}):
        verifier = "math_verify" if name == "math" else "???"
        result.put(("env", name, "verifier"), verifier)
        result.note(node, f"guessed {dotted(('env', name, 'verifier'))}: {verifier}")
    if rest == ["num_workers"]:
        result.put(path, node.plain())
    elif rest:
        result.note(node, f"dropped {dotted(path)}: the verifier decides")
    elif node.value not in (None, {}):
        result.note(node, f"dropped {dotted(path)} = {shown(node.plain())}: expected a map")


def _processor(result: Conversion, path: Path, node: Node) -> None:
    result.note(node, f"dropped {dotted(path)}: prompts are made from data.default.prompt_file and the chat template")


SPECIAL: dict[Path, Callable[[Conversion, Path, Node], None]] = {
    ("checkpointing", "metric_name"): _metric,
    ("data", "default", "processor"): _processor,
    ("data", "train"): _dataset,
    ("data", "validation"): _dataset,
    ("env",): _environment,
}


def _cluster(result: Conversion, root: Node) -> None:
    """The GPU is not part of a NeMo-RL recipe; its node size tells it among the machines of the shipped ones."""
    per_node = result.recipe.get("cluster", {}).get("gpus_per_node")
    if isinstance(per_node, int) and per_node in GPU_OF_NODE:
        gpu = GPU_OF_NODE[per_node]
        result.put(("cluster", "gpu_type"), gpu)
        result.note(root, f"guessed cluster.gpu_type {gpu} from {per_node} GPUs on a node")
    result.recipe.setdefault("data", {}).setdefault("validation", None)


def main() -> int:
    """Converts, prints and checks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=pathlib.Path)
    arguments = parser.parse_args()
    try:
        result = convert(arguments.recipe)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    text = to_yaml(result.recipe)
    print(text, end="")
    print("\n".join(result.notes), file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        # The check needs the file's name: rules compare it with what the recipe does.
        copy = pathlib.Path(folder) / arguments.recipe.name
        copy.write_text(text)
        try:
            load_recipe(copy)
        except RecipeError as error:
            for problem in error.problems:
                print(f"to do: {problem.path}: {problem.message}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
