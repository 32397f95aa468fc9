"""Rules on names: what a file is called, what it does and where it writes agree."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath

from nemo_rl_moe.recipe.rules.registry import Context, Finding, rule
from nemo_rl_moe.recipe.source import nearest, split_dotted


def _written_in_a_file(context: Context, key: str) -> bool:
    """A directory from the command line is the user's choice for one run."""
    return nearest(context.tree, split_dotted(key)).source.line > 0


@rule("run name", "Runs write to folders named after their recipe, so that no two recipes share one.")
def directories_match_stem(context: Context) -> Iterator[Finding]:
    recipe, stem = context.recipe, context.path.stem
    for key, value in (
        ("logger.log_dir", recipe.logger.log_dir),
        ("checkpointing.checkpoint_dir", recipe.checkpointing.checkpoint_dir),
    ):
        if value is not None and _written_in_a_file(context, key) and stem not in PurePath(value).parts:
            yield Finding((key,), f"{value!r} does not name the recipe, expected a folder {stem}, or null")
    name = recipe.logger.wandb.name
    if name is not None and _written_in_a_file(context, "logger.wandb.name") and name != stem:
        yield Finding(("logger.wandb.name",), f"{name!r} is not the recipe's name, expected {stem}, or null")


@rule("file name", "A file name that states nodes, GPUs, placement or precision states what the recipe does.")
def stem_states_the_truth(context: Context) -> Iterator[Finding]:
    recipe, stem = context.recipe, context.path.stem
    size = re.search(r"-(\d+)n(\d+)g(?=-|\.|$)", stem)
    if size:
        for key, said, found in (
            ("cluster.num_nodes", int(size[1]), recipe.cluster.num_nodes),
            ("cluster.gpus_per_node", int(size[2]), recipe.cluster.gpus_per_node),
        ):
            if said != found:
                yield Finding((key,), f"{found}, but the file name says {said}")
    off = re.search(r"-async-(\d+)off(?=-|\.|$)", stem)
    ahead = recipe.grpo.async_grpo
    if bool(off) != ahead.enabled and (off or size):
        placement = "async" if off else "sync"
        yield Finding(("grpo.async_grpo.enabled",), f"{str(ahead.enabled).lower()}, but the file name says {placement}")
    elif off and int(off[1]) != ahead.max_trajectory_age_steps:
        message = f"{ahead.max_trajectory_age_steps}, but the file name says {off[1]}"
        yield Finding(("grpo.async_grpo.max_trajectory_age_steps",), message)
    mx = recipe.policy.generation.vllm_cfg.is_mx
    if size and mx != ("-mxfp8-rollout" in stem):
        rollout = "mxfp8-rollout" if not mx else "no mxfp8-rollout"
        yield Finding(("policy.generation.vllm_cfg.is_mx",), f"{str(mx).lower()}, but the file name says {rollout}")
