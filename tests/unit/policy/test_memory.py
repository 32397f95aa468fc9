"""The peak is of this process, in GiB, and does not fall when memory is given back."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, torch
from nemo_rl_moe.policy.memory import peak_gib
cpu = torch.device("cpu")
peaks = [peak_gib(cpu)]
held = torch.ones(2**27)
peaks.append(peak_gib(cpu))
del held
peaks.append(peak_gib(cpu))
print(json.dumps(peaks))
"""


def test_half_a_gib_held_for_a_moment_raises_the_peak_by_half_a_gib_for_good() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    before, during, after = json.loads(done.stdout)
    assert 0.4 < during - before < 0.6
    assert after == pytest.approx(during, abs=0.01)
