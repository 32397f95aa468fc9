"""The command line in a process of its own: exit codes, streams, JSON. Risk: a script misled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.recipes.writing import CONFIGS, PERFORMANCE, TINY, write

REPO = CONFIGS.parents[1]
SYNC = PERFORMANCE / "grpo-qwen3-30ba3b-4n4g.yaml"
ASYNC = PERFORMANCE / "grpo-qwen3-30ba3b-4n4g-async-1off.yaml"


def cli(*arguments: str | Path, cwd: Path = REPO) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "nemo_rl_moe", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_validate_of_all_shipped_recipes_exits_0_with_a_summary():
    done = cli("validate", CONFIGS)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].endswith(" recipe(s), 0 with errors, 0 error(s)")


def test_validate_reports_all_problems_of_all_files_and_exits_2(tmp_path):
    write(tmp_path, "a.yaml", f"defaults: {TINY}\ngrpo: {{sed: 1}}\n")
    write(tmp_path, "b.yaml", f"defaults: {TINY}\ngrpo:\n  num_generations_per_prompt: 1\n")
    write(tmp_path, "c.yaml", f"defaults: {TINY}\n")
    done = cli("validate", tmp_path)
    assert done.returncode == 2
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert "a.yaml:2: grpo.sed: unknown key; did you mean grpo.seed?" in lines[0]
    assert "b.yaml:3: grpo.num_generations_per_prompt: every advantage of a group of one is 0" in lines[1]
    assert lines[2] == "3 recipe(s), 2 with errors, 2 error(s)"


def test_validate_json_is_one_document_with_rule_line_and_value(tmp_path):
    path = write(tmp_path, "a.yaml", f"defaults: {TINY}\ngrpo:\n  max_num_steps: 0\n")
    done = cli("validate", path, "--json")
    assert done.returncode == 2
    problem = json.loads(done.stdout)["recipes"][0]["problems"][0]
    assert (problem["rule"], problem["line"], problem["path"], problem["value"]) == ("type", 3, "grpo.max_num_steps", 0)


def test_two_recipes_with_one_directory_collide(tmp_path):
    write(tmp_path, "x/same.yaml", f"defaults: {TINY}\nlogger: {{log_dir: runs/same}}\n")
    write(tmp_path, "y/same.yaml", f"defaults: {TINY}\nlogger: {{log_dir: runs/same/}}\n")
    done = cli("validate", tmp_path)
    assert done.returncode == 2
    assert "y/same.yaml:2: logger.log_dir: runs/same/ is also the directory of " in done.stdout


def test_two_recipes_of_one_name_in_two_folders_collide(tmp_path):
    write(tmp_path, "x/same.yaml", f"defaults: {TINY}\n")
    write(tmp_path, "y/same.yaml", f"defaults: {TINY}\n")
    done = cli("validate", tmp_path)
    assert done.returncode == 2 and "logger.log_dir: runs/same is also the directory of " in done.stdout


def test_missing_recipe_folder_without_recipes_and_no_command_exit_2(tmp_path):
    assert cli("validate", tmp_path / "no.yaml").returncode == 2
    assert "no YAML file" in cli("validate", tmp_path).stderr
    assert cli().returncode == 2
    done = cli("run", tmp_path / "no.yaml")
    assert done.returncode == 2 and "no such recipe" in done.stderr and "Traceback" not in done.stderr


def test_dry_run_prints_the_plan_and_starts_nothing(tmp_path):
    done = cli("run", TINY, "--dry-run", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("grpo-tiny-moe-cpu: 1 node(s) x 1 cpu device(s), colocated")
    assert list(tmp_path.iterdir()) == []


def test_run_refuses_what_this_version_would_ignore():
    done = cli("run", PERFORMANCE / "grpo-qwen3-30ba3b-4n8g.yaml", "policy.megatron_cfg.cuda_graph_impl=local")
    assert done.returncode == 2
    assert "cuda_graph_impl: local with cluster.device cuda, expected none" in done.stderr


def test_plan_json_of_a_cluster_recipe_holds_16_ranks():
    done = cli("plan", SYNC, "--json")
    data = json.loads(done.stdout)
    assert (data["recipe"], len(data["policy_ranks"]), data["policy_dp"]) == ("grpo-qwen3-30ba3b-4n4g", 16, 16)
    assert data["environment"]["policy"]["NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"] == "16"


def test_config_show_is_yaml_that_loads_to_the_same_recipe(tmp_path):
    from nemo_rl_moe.recipe.load import load_recipe

    shown = tmp_path / "shown-async-1off.yaml"
    shown.write_text(cli("config", "show", ASYNC).stdout)
    assert load_recipe(shown, check=False).recipe == load_recipe(ASYNC).recipe
    assert json.loads(cli("config", "show", ASYNC, "--json").stdout)["cluster"]["segment_size"] == 2


def test_config_why_prints_the_chain():
    done = cli("config", "why", ASYNC, "policy.megatron_cfg.expert_model_parallel_size")
    assert [line.split("configs/")[-1] for line in done.stdout.splitlines()] == [
        "policy.megatron_cfg.expert_model_parallel_size = 8",
        "recipes/llm/performance/grpo-qwen3-30ba3b-4n4g-async-1off.yaml:7: 8",
        "recipes/llm/performance/grpo-qwen3-30ba3b-4n4g.yaml:7: 16",
        "grpo_math_gpu.yaml:17: 8",
    ]


def test_config_why_of_a_default_of_a_command_line_value_and_of_no_key():
    assert cli("config", "why", TINY, "grpo.seed").stdout == "grpo.seed = 42\n  the schema's default\n"
    done = cli("config", "why", TINY, "grpo.max_num_steps", "grpo.max_num_steps=3", "--json")
    data = json.loads(done.stdout)
    assert data["value"] == 3 and data["history"][0]["file"] == "command line 'grpo.max_num_steps=3'"
    done = cli("config", "why", TINY, "grpo.sed")
    assert done.returncode == 2 and done.stderr == "grpo.sed: the schema has no such key; did you mean grpo.seed?\n"


def test_config_diff_lists_the_keys_that_differ():
    done = cli("config", "diff", SYNC, SYNC.with_name("grpo-qwen3-30ba3b-4n4g-mxfp8-rollout.yaml"), "--json")
    rows = {row["key"]: (row.get("a"), row.get("b")) for row in json.loads(done.stdout)["differences"]}
    assert rows["policy.generation.vllm_cfg.precision"] == ("auto", "fp8")
    assert len(rows) == 5
    assert cli("config", "diff", SYNC, SYNC).stdout == "no difference\n"


def test_config_diff_tells_true_from_1(tmp_path, capsys):
    from nemo_rl_moe.cli import main

    start = f"defaults: {TINY}\npolicy: {{generation: {{vllm_kwargs: {{"
    one = write(tmp_path, "one.yaml", start + "a: 1, b: [1]}}}\n")
    other = write(tmp_path, "other.yaml", start + "a: true, b: [1.0]}}}\n")
    assert main(["config", "diff", str(one), str(other)]) == 0
    key = "policy.generation.vllm_kwargs"
    assert capsys.readouterr().out.splitlines() == [
        f"{key}.a: 1 -> true",
        f"{key}.b: [1] -> [1.0]",
        "2 key(s) differ",
    ]


def test_config_minimize_check_names_the_redundant_lines(tmp_path):
    path = write(tmp_path, "a.yaml", f"defaults: {TINY}\ncluster:\n  device: cpu\ngrpo:\n  seed: 1\n")
    done = cli("config", "minimize", path, "--check")
    assert done.returncode == 2
    assert done.stdout.endswith("a.yaml:2: cluster: a map of 1 keys is inherited already\n")
    assert cli("config", "minimize", path).stdout == f"defaults: {TINY}\ngrpo:\n  seed: 1\n"


def test_interrupt_and_failure_have_their_exit_codes(monkeypatch, capsys):
    from nemo_rl_moe import cli as module

    def interrupted(arguments):
        raise KeyboardInterrupt

    def failed(arguments):
        raise RuntimeError("engine died")

    monkeypatch.setattr(module, "_plan", interrupted)
    assert module.main(["plan", str(TINY)]) == 130
    monkeypatch.setattr(module, "_plan", failed)
    assert module.main(["plan", str(TINY)]) == 1
    assert "engine died" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["validate", "plan"])
def test_command_imports_neither_torch_nor_ray(command):
    code = (
        "import sys; from nemo_rl_moe.cli import main; "
        f"main([{command!r}, {str(SYNC)!r}]); print(sorted({{'torch', 'ray', 'vllm', 'numpy'}} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_overrides_may_stand_before_and_after_options():
    done = cli("config", "show", TINY, "grpo.seed=3", "--json", "grpo.max_num_steps=4")
    shown = json.loads(done.stdout)["grpo"]
    assert (shown["seed"], shown["max_num_steps"]) == (3, 4)
    done = cli("plan", TINY, "--nope")
    assert done.returncode == 2 and "unrecognized arguments: --nope" in done.stderr


def test_doctor_prints_one_json_document():
    checks = json.loads(cli("doctor", "--json").stdout)["checks"]
    assert {"torch", "ray"} <= {check["name"] for check in checks}


def test_async_cpu_recipe_is_planned_on_2_devices_of_one_core():
    recipe = CONFIGS / "recipes/llm/grpo-tiny-moe-cpu-async-1off.yaml"
    assert "1 node(s) x 2 cpu device(s), split" in cli("plan", recipe).stdout


def test_plan_json_has_groups_and_memory():
    data = json.loads(cli("plan", SYNC, "--json").stdout)
    groups = {kind["name"]: kind["ranks"] for kind in data["process_groups"]}
    assert groups["EP"] == [list(range(16))]
    assert data["memory"]["parameters"] == 30_532_122_624
    assert {phase["name"] for phase in data["memory"]["phases"]} == {"training", "log-probabilities", "generation"}
