"""The plan of a recipe, as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from nemo_rl_moe.recipe.load import LoadedRecipe
from nemo_rl_moe.recipe.memory_report import memory_lines
from nemo_rl_moe.recipe.plan import Plan, plan
from nemo_rl_moe.recipe.process_groups import ProcessGroups


def print_plan(loaded: LoadedRecipe, *, as_json: bool) -> None:
    """Prints the plan of a recipe."""
    layout = plan(loaded.recipe)
    if as_json:
        warnings = [warning.as_dict() for warning in loaded.warnings]
        print(json.dumps({"recipe": loaded.name, **layout.as_dict(), "warnings": warnings}, indent=1))
        return
    print("\n".join(_plan_lines(loaded, layout)))


def _plan_lines(loaded: LoadedRecipe, layout: Plan) -> list[str]:
    megatron, vllm, batch = loaded.recipe.policy.megatron_cfg, loaded.recipe.policy.generation.vllm_cfg, layout.batch
    placement = "colocated (in turns on the same devices)" if layout.colocated else "split"
    lines = [
        f"{loaded.name}: {layout.num_nodes} node(s) x {layout.devices_per_node} {layout.device} device(s), {placement}",
        f"policy: {layout.policy_world} rank(s), TP {megatron.tensor_model_parallel_size} "
        f"PP {megatron.pipeline_model_parallel_size} CP {megatron.context_parallel_size} DP {layout.policy_dp}, "
        f"EP {megatron.expert_model_parallel_size} ETP {megatron.expert_tensor_parallel_size} EDP {layout.policy_edp}, "
        f"dispatcher {megatron.moe_token_dispatcher_type}",
    ]
    if loaded.recipe.benchmark.policy_only:
        lines.append(
            f"step: {batch.train_global_batch_size} samples, {batch.samples_per_dp_rank} on each data-parallel rank; "
            "nothing is generated"
        )
    else:
        lines += [
            f"generation: {len(layout.engines)} engine(s) of {layout.engine_size} device(s), "
            f"TP {vllm.tensor_parallel_size} PP {vllm.pipeline_parallel_size} EP {vllm.expert_parallel_size}",
            f"step: {batch.prompts_per_step} prompts x {batch.generations_per_prompt} = "
            f"{batch.samples_per_step} samples, "
            f"{batch.optimizer_steps_per_step} optimizer step(s) of {batch.train_global_batch_size}, "
            f"{batch.samples_per_dp_rank} on each data-parallel rank, "
            f"{batch.prompts_per_engine:g} prompts on each engine",
        ]
    if batch.train_microbatch_tokens is not None:
        lines.append(
            f"packing: micro-batches of {batch.train_microbatch_tokens} tokens in training, "
            f"{batch.logprob_microbatch_tokens} for log-probabilities"
        )
    if loaded.recipe.data.validation is not None and layout.engines:
        sizes = batch.validation_batches
        lines.append(f"validation: {sum(sizes)} prompts at most, in {len(sizes)} batch(es), the last of {sizes[-1]}")
    lines += ["", *_group_lines(layout.process_groups), "", *memory_lines(layout)]
    lines += ["", "rank  node  device  tp cp dp pp  etp ep edp"]
    lines += [
        f"{r.rank:4d}  {r.node:4d}  {r.device:6d}  {r.tp:2d} {r.cp:2d} {r.dp:2d} {r.pp:2d}  "
        f"{r.etp:3d} {r.ep:2d} {r.edp:3d}"
        for r in layout.policy_ranks
    ]
    lines += ["", "engine  node  devices"]
    lines += [f"{e.index:6d}  {e.node:4d}  {_span(e.devices)}" for e in layout.engines]
    for kind, variables in layout.environment.items():
        lines += ["", f"environment of {kind} workers:", *(f"  {name}={value}" for name, value in variables.items())]
    lines += ["", *map(str, loaded.warnings)] if loaded.warnings else []
    return lines


# More groups of one kind are cut in the text; --json has all of them.
_SHOWN_GROUPS = 4


def _group_lines(groups: Sequence[ProcessGroups]) -> list[str]:
    lines = ["process groups   size  number  ranks"]
    for kind in groups:
        shown = " ".join(f"[{_ranks(members)}]" for members in kind.ranks[:_SHOWN_GROUPS])
        rest = len(kind.ranks) - _SHOWN_GROUPS
        more = f" and {rest} more" if rest > 0 else ""
        lines.append(f"  {kind.name:13s} {kind.size:5d}  {len(kind.ranks):6d}  {shown}{more}")
    return lines


def _ranks(members: Sequence[int]) -> str:
    """Ranks of a group; a long regular one as its first and last rank and the step between."""
    step = members[1] - members[0] if len(members) > 1 else 1
    if len(members) > 4 and list(members) == list(range(members[0], members[-1] + 1, step)):
        return f"{members[0]}-{members[-1]}" + (f" step {step}" if step > 1 else "")
    return ",".join(map(str, members))


def _span(devices: Sequence[int]) -> str:
    return str(devices[0]) if len(devices) == 1 else f"{devices[0]}-{devices[-1]}"
