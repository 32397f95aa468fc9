"""The run directory: never mixes runs, never loses one, never holds a secret, and always says how it ended."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.load import LoadedRecipe
from nemo_rl_moe.tracking import manifest
from nemo_rl_moe.tracking.run_dir import RunDirectory

REPOSITORY = Path(__file__).resolve().parents[3]
Load = Callable[..., LoadedRecipe]


def run_once(loaded: LoadedRecipe, *, resume: bool = False) -> RunDirectory:
    directory = RunDirectory.open(loaded, resume=resume)
    directory.finish(0, "done")
    directory.close()
    return directory


def read_manifest(path: Path) -> dict:
    return json.loads((path / "manifest.json").read_text())


def test_a_new_run_has_its_recipe_and_a_manifest_with_versions_host_devices_placement_and_hashes(load: Load) -> None:
    loaded = load("grpo.seed=7")
    directory = RunDirectory.open(loaded, resume=False)
    config = yaml.safe_load((directory.path / "config.yaml").read_text())
    assert config["grpo"]["seed"] == 7
    written = read_manifest(directory.path)
    assert written["recipe"] == "small"
    assert written["versions"]["python"] == sys.version.split()[0]
    assert {"torch", "ray", "vllm", "megatron-core", "transformers"} <= set(written["versions"])
    assert written["versions"]["torch"] == manifest.installed_version("torch")
    assert written["host"]["cores"] == len(os.sched_getaffinity(0))
    assert written["host"]["memory_bytes"] > 1 << 30
    assert written["devices"]["kind"] == "cpu"
    assert written["placement"]["policy_world"] == 1
    digest = hashlib.sha256(loaded.path.read_bytes()).hexdigest()
    assert written["recipe_files"] == [{"path": str(loaded.path), "sha256": digest}]
    assert "grpo.seed=7" in written["overrides"]
    assert written["end"] is None and written["exit_code"] is None
    directory.finish(1, "RuntimeError: boom")
    directory.close()
    ended = read_manifest(directory.path)
    assert (ended["exit_code"], ended["reason"]) == (1, "RuntimeError: boom")
    assert ended["end"] >= ended["start"]
    assert "ended with exit code 1: RuntimeError: boom" in (directory.path / "run.log").read_text()


def test_the_manifest_names_the_commit_that_git_names() -> None:
    commit = subprocess.run(
        ["git", "-C", str(REPOSITORY), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    state = manifest.git_state()
    assert (state["commit"] if state else "") == commit


def test_no_secret_of_environment_recipe_or_command_line_is_in_any_file(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "wandb-secret-0123")
    monkeypatch.setenv("DB_PASSWORD", "correct horse")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    override = "+policy.generation.vllm_cfg.env_vars.AWS_SECRET=aws-secret-99"
    monkeypatch.setattr(sys, "argv", ["nemo-rl-moe", "run", "small.yaml", override, "policy.x.env_vars={MY_KEY:k1}"])
    directory = RunDirectory.open(load(override), resume=False)
    directory.log("cannot reach https://me:hunter2@example.org with wandb-secret-0123")
    directory.write_rollouts(1, [{"response": "fine"}])
    directory.finish(1, "login failed: correct horse")
    directory.close()
    everything = "".join(p.read_text() for p in directory.path.rglob("*") if p.is_file())
    for secret in ("hf_secretvalue", "wandb-secret-0123", "correct horse", "aws-secret-99", "hunter2", "k1"):
        assert secret not in everything, secret
    config = yaml.safe_load((directory.path / "config.yaml").read_text())
    assert config["policy"]["megatron_cfg"]["env_vars"] == {"HF_TOKEN": "<redacted>", "OMP_NUM_THREADS": "1"}
    # Names of the schema that only look secret keep their values.
    assert config["data"]["train"]["answer_key"] == "answer"
    assert config["policy"]["generation"]["max_new_tokens"] == 16
    assert read_manifest(directory.path)["command"][3:] == [
        "+policy.generation.vllm_cfg.env_vars.AWS_SECRET=<redacted>",
        "policy.x.env_vars=<redacted>",
    ]


def test_running_the_same_recipe_3_times_keeps_all_three(load: Load, tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        directory = run_once(load(f"grpo.seed={seed}"))
    assert directory.notes == [f"set aside the earlier run as {tmp_path / 'run.2'}"]
    seeds = {
        name: yaml.safe_load((tmp_path / name / "config.yaml").read_text())["grpo"]["seed"]
        for name in ("run", "run.1", "run.2")
    }
    assert seeds == {"run.1": 1, "run.2": 2, "run": 3}


def test_a_directory_of_another_recipe_is_refused_and_left_as_it_was(load: Load, tmp_path: Path) -> None:
    run_once(load())
    before = (tmp_path / "run/manifest.json").read_bytes()
    with pytest.raises(UserError, match="holds a run of the recipe 'small', this is 'other'"):
        RunDirectory.open(load(name="other"), resume=False)
    assert (tmp_path / "run/manifest.json").read_bytes() == before
    assert sorted(p.name for p in tmp_path.glob("run*")) == ["run"]


def test_a_directory_with_files_that_are_no_run_is_refused(load: Load, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.tex").write_text("precious")
    with pytest.raises(UserError, match=r"logger\.log_dir: .*run is not empty and holds no run"):
        RunDirectory.open(load(), resume=False)
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_a_file_in_the_place_of_the_directory_is_refused(load: Load, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError, match="is a file, expected a directory"):
        RunDirectory.open(load(), resume=False)


def test_a_directory_left_by_a_kill_before_the_manifest_can_be_used(load: Load, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.log").write_text("")
    assert not run_once(load()).resumed


def test_resume_keeps_start_and_earlier_session_and_lists_what_changed(load: Load, tmp_path: Path) -> None:
    run_once(load())
    first = read_manifest(tmp_path / "run")
    again = run_once(load("grpo.max_num_steps=20", "policy.megatron_cfg.optimizer.lr=0.001"), resume=True)
    written = read_manifest(tmp_path / "run")
    assert again.resumed
    assert again.notes == [
        "resumed with policy.megatron_cfg.optimizer.lr: 5e-06 -> 0.001",
        "resumed with grpo.max_num_steps: 10 -> 20",
    ]
    assert written["start"] == first["start"]
    assert len(written["sessions"]) == 2
    assert written["sessions"][0] == first["sessions"][0]
    assert written["sessions"][1]["changed"][1] == {"key": "grpo.max_num_steps", "before": 10, "after": 20}
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["grpo"]["max_num_steps"] == 20


def test_resume_without_an_earlier_run_begins_one(load: Load) -> None:
    assert not run_once(load(), resume=True).resumed


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("policy.model_name=other/model", "policy.model_name: was 'some/model', now 'other/model'"),
        ("data.train.task=prime_factorization", "data.train.task: was 'chain_sum', now 'prime_factorization'"),
        ("data.shuffle=false", "data.shuffle: was True, now False"),
        ("grpo.seed=1", "grpo.seed: was 42, now 1"),
    ],
)
def test_resume_with_other_data_or_model_is_refused_with_both_values(
    load: Load, tmp_path: Path, override: str, told: str
) -> None:
    run_once(load())
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.is_file()}
    with pytest.raises(UserError, match=told):
        RunDirectory.open(load(override), resume=True)
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.is_file()} == before


HOLDER = """
import sys, time
from nemo_rl_moe.recipe.load import load_recipe
from nemo_rl_moe.tracking.run_dir import RunDirectory
d = RunDirectory.open(load_recipe(sys.argv[1], [f"logger.log_dir={sys.argv[2]}"], check=False), resume=False)
print("held", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("resume", [False, True])
def test_a_directory_of_a_living_process_is_refused_and_free_after_kill_9(
    load: Load, tmp_path: Path, resume: bool
) -> None:
    loaded = load()
    command = [sys.executable, "-c", HOLDER, str(loaded.path), str(tmp_path / "run")]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(UserError, match="belongs to a run that is still going on"):
                RunDirectory.open(loaded, resume=resume)
        finally:
            holder.send_signal(signal.SIGKILL)
    assert run_once(loaded, resume=resume).resumed is resume
    killed = read_manifest(tmp_path / ("run" if resume else "run.1"))["sessions"][0]
    assert killed["end"] is None and killed["exit_code"] is None


def test_the_manifest_is_whole_at_every_moment_of_20_rewrites(load: Load, tmp_path: Path) -> None:
    directory = RunDirectory.open(load(), resume=False)
    reader = (
        "import json, os, sys\n"
        "n = 0\n"
        "while not os.path.exists(sys.argv[2]): json.load(open(sys.argv[1])); n += 1\n"
        "print(n)"
    )
    stop = tmp_path / "stop"
    arguments = [sys.executable, "-c", reader, str(directory.path / "manifest.json"), str(stop)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        try:
            time.sleep(0.2)
            for size in range(20):
                directory.update_manifest(padding="x" * (1000 * (size % 7)))
        finally:
            stop.touch()
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 0 and int(out) > 20
    directory.close()


def test_rollouts_keep_unicode_and_write_nan_as_null(load: Load, tmp_path: Path) -> None:
    directory = RunDirectory.open(load(), resume=False)
    directory.write_rollouts(3, [{"response": "12 ÷ 4 = 3", "reward": float("nan")}, {"response": "x", "reward": 1.0}])
    directory.write_rollouts(4, [])
    lines = (tmp_path / "run/rollouts/step_3.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"response": "12 ÷ 4 = 3", "reward": None},
        {"response": "x", "reward": 1.0},
    ]
    assert "÷" in lines[0]
    assert sorted(p.name for p in (tmp_path / "run/rollouts").iterdir()) == ["step_3.jsonl"]
    directory.close()
