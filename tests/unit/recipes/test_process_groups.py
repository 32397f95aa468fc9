"""Risk: a plan that names other ranks than those that will talk to one another."""

from __future__ import annotations

import pytest

from nemo_rl_moe.recipe.plan import plan
from nemo_rl_moe.recipe.process_groups import process_groups
from tests.unit.recipes.shared import loaded

# Name here, Megatron's token, and whether it belongs to the experts' view.
TOKENS = [
    ("TP", "tp", False),
    ("CP", "cp", False),
    ("DP", "dp", False),
    ("DP x CP", "dp-cp", False),
    ("PP", "pp", False),
    ("EP", "ep", True),
    ("ETP", "tp", True),
    ("expert DP", "dp", True),
]
LAYOUTS = [
    "grpo-qwen3-235b-16n4g",  # TP 2 PP 4 CP 2 EP 16
    "grpo-qwen3-235b-32n4g-async-1off",  # TP 4 PP 4 EP 16, half of the devices
    "grpo-deepseek-v3-32n8g",  # PP 16 EP 16
    "grpo-nemotron3-super-120BA12B-32n8g",  # TP 4 EP 32 expert DP 8
    "dapo-deepseek-v3-64n8g.v2",  # TP 8 PP 8 CP 4 EP 32
    "grpo-qwen3-32b-4n4g",  # TP 2 PP 4, dense
]


def groups_of(name: str) -> dict[str, list[list[int]]]:
    return {kind.name: kind.ranks for kind in plan(loaded(name).recipe).process_groups}


def test_groups_of_tp2_pp4_cp2_ep16_on_64_ranks_are_written_out():
    groups = groups_of("grpo-qwen3-235b-16n4g")
    assert groups["TP"][:2] == [[0, 1], [2, 3]] and len(groups["TP"]) == 32
    assert groups["CP"][:2] == [[0, 2], [1, 3]]
    assert groups["DP"][0] == [0, 4, 8, 12] and groups["DP"][-1] == [51, 55, 59, 63]
    assert groups["DP x CP"][0] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert groups["PP"][5] == [5, 21, 37, 53]
    assert groups["EP"] == [list(range(start, start + 16)) for start in (0, 16, 32, 48)]
    assert groups["ETP"] == groups["expert DP"] == [[rank] for rank in range(64)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_kind_of_group_holds_every_rank_once(name):
    layout = plan(loaded(name).recipe)
    for kind in process_groups(layout.policy_ranks):
        assert sorted(rank for group in kind.ranks for rank in group) == list(range(layout.policy_world)), kind.name
        assert {len(group) for group in kind.ranks} == {kind.size}


@pytest.mark.parametrize("name", LAYOUTS)
def test_groups_are_those_of_megatrons_rank_generator(name):
    generator = pytest.importorskip("megatron.core.parallel_state").RankGenerator
    recipe = loaded(name).recipe
    layout, megatron = plan(recipe), recipe.policy.megatron_cfg
    order, pp = "tp-cp-ep-dp-pp", megatron.pipeline_model_parallel_size
    dense = generator(
        tp=megatron.tensor_model_parallel_size,
        ep=1,
        dp=layout.policy_dp,
        pp=pp,
        cp=megatron.context_parallel_size,
        order=order,
    )
    experts = generator(
        tp=megatron.expert_tensor_parallel_size,
        ep=megatron.expert_model_parallel_size,
        dp=layout.policy_edp,
        pp=pp,
        cp=1,
        order=order,
    )
    ours = groups_of(name)
    for kind, token, is_expert in TOKENS:
        assert ours[kind] == [list(group) for group in (experts if is_expert else dense).get_ranks(token)], kind
