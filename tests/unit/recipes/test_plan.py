"""Risk: a rank on the wrong device, a batch counted wrongly."""

from __future__ import annotations

from nemo_rl_moe.recipe.hybrid_ep import RANKS_ENV
from nemo_rl_moe.recipe.load import load_recipe
from nemo_rl_moe.recipe.plan import plan
from tests.unit.recipes.shared import loaded
from tests.unit.recipes.writing import PERFORMANCE, TINY


def planned(name: str, *overrides: str):
    return plan(loaded(name, *overrides).recipe)


def test_main_job_takes_turns_on_one_device():
    layout = plan(load_recipe(TINY).recipe)
    assert (layout.policy_world, layout.generation_world, layout.total_devices) == (1, 1, 1)
    assert layout.policy_bundles == [0] and layout.generation_bundles == [0]
    assert layout.environment["policy"]["OMP_NUM_THREADS"] == str(layout.threads_per_worker)


def test_split_run_gives_the_last_nodes_to_the_generator():
    layout = planned("grpo-qwen3-30ba3b-4n4g-async-1off")
    assert layout.policy_bundles == list(range(8))
    assert layout.generation_bundles == list(range(8, 16))
    assert {rank.node for rank in layout.policy_ranks} == {0, 1}
    assert {engine.node for engine in layout.engines} == {2, 3}


def test_split_within_one_node_gives_it_the_last_devices():
    recipe = load_recipe(
        PERFORMANCE / "grpo-llama3.1-8b-instruct-2n8g-async-1off.yaml",
        ["cluster.num_nodes=1", "policy.generation.colocated.resources={num_nodes: null, gpus_per_node: 2}",
         "grpo.num_prompts_per_step=48", "policy.train_global_batch_size=1536"],
        check=False,
    ).recipe  # fmt: skip
    layout = plan(recipe)
    assert (layout.policy_bundles, layout.generation_bundles) == ([0, 1, 2, 3, 4, 5], [6, 7])


def test_engines_of_16_gpus_fill_the_cluster_in_order():
    layout = planned("grpo-qwen3-235b-16n8g")
    assert layout.engine_size == 16 and len(layout.engines) == 8
    assert layout.generation_bundles == [0, 16, 32, 48, 64, 80, 96, 112]
    assert layout.engines[1].devices == tuple(range(16, 32))


def test_coordinates_follow_megatrons_order_with_folded_experts():
    layout = planned("grpo-qwen3-235b-16n4g")
    rank = layout.policy_ranks[37]
    # 64 ranks, TP 2, CP 2, PP 4: a stage is 16 ranks; 37 = 2 * 16 + 5, and 5 = tp 1 + 2 * (cp 0 + 2 * dp 1).
    assert (rank.pp, rank.tp, rank.cp, rank.dp) == (2, 1, 0, 1)
    assert (rank.ep, rank.edp, rank.etp) == (5, 0, 0)
    assert (layout.policy_dp, layout.policy_edp) == (4, 1)


def test_expert_groups_are_consecutive_ranks_of_one_stage():
    layout = planned("grpo-deepseek-v3-64n4g")
    groups: dict[tuple[int, int], list[int]] = {}
    for rank in layout.policy_ranks:
        groups.setdefault((rank.pp, rank.edp), []).append(rank.rank)
    assert len(groups) == 8
    assert all(ranks == list(range(ranks[0], ranks[0] + 32)) for ranks in groups.values())


def test_batch_arithmetic_of_four_optimizer_steps():
    batch = planned("grpo-qwen3-30ba3b-24n8g-async-8off").batch
    assert (batch.samples_per_step, batch.optimizer_steps_per_step, batch.samples_per_dp_rank) == (2048, 4, 4)
    assert (batch.prompts_per_engine, batch.train_microbatch_tokens, batch.logprob_microbatch_tokens) == (2, 4096, 8192)


def test_validation_keeps_the_last_batch_of_one():
    assert planned("grpo-qwen3-235b-16n4g").batch.validation_batches == [5, 5, 5, 1]


def test_environment_of_policy_workers_carries_the_topology_and_the_generators_does_not():
    environment = planned("grpo-qwen3-30ba3b-4n4g").environment
    assert environment["policy"][RANKS_ENV] == "16"
    assert RANKS_ENV not in environment["generation"]


def test_plan_is_plain_data():
    import json

    data = planned("grpo-qwen3-30ba3b-4n4g").as_dict()
    assert json.loads(json.dumps(data))["policy_ranks"][3]["device"] == 3


def test_plan_prints_groups_memory_and_what_is_assumed(capsys):
    from nemo_rl_moe.recipe.plan_report import print_plan

    print_plan(loaded("grpo-qwen3-235b-16n4g"), as_json=False)
    text = capsys.readouterr().out
    assert "EP               16       4  [0-15] [16-31] [32-47] [48-63]" in text
    assert "DP x CP           8       8  [0-14 step 2] [1-15 step 2]" in text
    assert "235,093,634,560 parameters, 183.2 GiB usable on each GPU" in text
    assert "host memory per node:" in text and "assumed: overhead of 3 to 8 GiB" in text


def test_plan_of_a_model_that_is_not_here_says_so_and_prints_the_rest(capsys):
    from nemo_rl_moe.recipe.plan_report import print_plan

    print_plan(loaded("grpo-qwen3-30ba3b-4n4g", "policy.model_name=some/model"), as_json=False)
    text = capsys.readouterr().out
    assert "memory: not known: some/model is no model folder here" in text and "16 rank(s)" in text
