"""What a mutation is, the valid recipes that are broken, and the file that a broken one is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.unit.recipes.writing import CONFIGS, PERFORMANCE, TINY

EP2 = TINY.with_name("grpo-tiny-moe-cpu-ep2.yaml")
SYNC = PERFORMANCE / "grpo-qwen3-30ba3b-4n4g.yaml"
ASYNC = PERFORMANCE / "grpo-qwen3-30ba3b-4n4g-async-1off.yaml"
JUPITER = CONFIGS / "recipes/llm/pretrain/megatron_moe_qwen235BA22B.yaml"
MXFP8 = PERFORMANCE / "grpo-qwen3-30ba3b-4n4g-mxfp8-rollout.yaml"
H100 = PERFORMANCE / "grpo-qwen3-30ba3b-4n8g.yaml"
DENSE = PERFORMANCE / "grpo-qwen3-32b-4n8g.yaml"
BIG = PERFORMANCE / "grpo-qwen3-235b-32n8g.yaml"
SUPER = PERFORMANCE / "grpo-nemotron3-super-120BA12B-32n4g.yaml"
FP8 = PERFORMANCE / "grpo-llama3.1-8b-instruct-2n8g-fp8-async-1off.yaml"

MEGATRON, VLLM = "policy.megatron_cfg", "policy.generation.vllm_cfg"
ENV = f"{MEGATRON}.env_vars"
RANKS = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"
OFF = {"data.validation": None}
UNKNOWN = {"policy.model_name": "nobody/a-model-of-unknown-shape"}
UNPACKED = {
    "policy.sequence_packing.enabled": False,
    "policy.sequence_packing.share_prompts": False,
    "policy.sequence_packing.fuse_loss": False,
}
ALLTOALL = {
    f"{MEGATRON}.moe_token_dispatcher_type": "alltoall",
    f"{MEGATRON}.moe_flex_dispatcher_backend": None,
    f"{MEGATRON}.moe_hybridep_num_sms": None,
    f"{MEGATRON}.moe_hybridep_prepad_packed_inputs": False,
    f"{MEGATRON}.env_vars": None,
}
HF = "policy.hf_config_overrides"


@dataclass(frozen=True)
class Mutation:
    """Keys laid over a valid recipe. The first one is to blame, unless `blamed` names another.

    Args:
        rule: the rule that is broken; empty where the recipe stays valid.
        base: the valid recipe.
        keys: dotted keys and their values; a key's own dots cannot be told from those between keys.
        message: part of the problem's message.
        stem: the file's name, which some rules compare with what the recipe does.
        overrides: of the command line.
        also: further keys to blame, of the same rule, where the mistake cannot be made in one key alone.
    """

    rule: str
    base: Path
    keys: dict
    message: str = ""
    blamed: str | None = None
    severity: str = "error"
    stem: str = "mutant"
    overrides: tuple[str, ...] = ()
    also: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The key to blame."""
        return self.blamed or next(iter(self.keys))


def M(rule, base, keys, message, blamed=None, severity="error", **others):
    """A recipe with one problem."""
    return Mutation(rule, base, keys, message, blamed, severity, **others)


def V(base, keys, **others):
    """A recipe at the edge of a rule, and valid."""
    return Mutation("", base, keys, **others)


def written(folder: Path, mutation: Mutation) -> tuple[Path, int]:
    """The recipe's file, and the line of the key to blame."""
    nested: dict = {"defaults": str(mutation.base)}
    for key, value in mutation.keys.items():
        node = nested
        *parents, last = key.split(".")
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    path = folder / f"{mutation.stem}.yaml"
    path.write_text(yaml.safe_dump(nested, sort_keys=False))
    node = yaml.compose(path.read_text())
    line = 1
    for part in mutation.path.split(".") if mutation.keys or mutation.blamed else ():
        found = next(((k, v) for k, v in node.value if k.value == part), None) if hasattr(node, "value") else None
        if found is None:
            break
        line, node = found[0].start_mark.line + 1, found[1]
    return path, line


def write_tiny_model(root: Path) -> None:
    """A model folder with the tiny model's shape, where the recipes look for it."""
    folder = root / "models/tiny-moe-cpu"
    folder.mkdir(parents=True)
    shape = {
        "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 1024,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape))
