"""Risk guarded: a failure that is understood drowns in a traceback, or one that is not loses its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest

from nemo_rl_moe.cli import main
from nemo_rl_moe.cluster.worker_group import WorkerDied
from nemo_rl_moe.errors import PhaseTimeout
from nemo_rl_moe.loops import run as run_module

TINY = Path(__file__).resolve().parents[2] / "examples/configs/recipes/llm/grpo-tiny-moe-cpu.yaml"


@pytest.mark.parametrize(
    ("error", "shown", "traceback"),
    [
        (WorkerDied("generation rank 0 died", 0, 0), "failed: generation rank 0 died\n", False),
        (
            PhaseTimeout("refit", "policy rank 1", 3.0),
            "failed: refit: no answer from policy rank 1 within 3 s\n",
            False,
        ),
        (KeyError("a fault of ours"), "KeyError: 'a fault of ours'\n", True),
    ],
)
def test_an_understood_failure_is_one_message_and_any_other_has_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, shown: str, traceback: bool
) -> None:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise error

    monkeypatch.setattr(run_module, "run_recipe", fail)
    assert main(["run", str(TINY)]) == 1
    printed = capsys.readouterr().err
    assert printed.endswith(shown)
    assert ("Traceback" in printed) is traceback
