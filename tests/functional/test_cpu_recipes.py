"""Risk: a shipped CPU recipe that validates and does not run. Each trains for real, in few and small steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional.cli import RECIPES, REPO, metrics

# Recipe: its model.
RUNNABLE = {
    "grpo-tiny-dense-cpu": "tiny-dense-cpu",
    "grpo-tiny-moe-cpu-padded": "tiny-moe-cpu",
    "grpo-tiny-moe-cpu-ep2": "tiny-moe-cpu",
    "grpo-tiny-moe-cpu-pp2": "tiny-moe-cpu",
    "grpo-tiny-moe-cpu-dynamic-sampling": "tiny-moe-cpu",
}
SMALL = (
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "grpo.max_num_steps=2",
    # Padded rows come in whole micro-batches: the 16 samples of a step in one of them.
    "policy.train_micro_batch_size=16",
    "policy.logprob_batch_size=16",
    "grpo.val_period=0",
)
# One process and one Ray for all of them: starting both takes longer than the two steps.
ALL_RUNS = """
import json, sys
from pathlib import Path
from nemo_rl_moe.cli import main
from nemo_rl_moe.cluster.ray_cluster import ray_session
from nemo_rl_moe.recipe.load import load_recipe
runs = json.loads(sys.argv[1])
with ray_session(load_recipe(runs[0][1]).recipe.cluster):
    codes = [main(arguments) for arguments in runs]
Path("codes.json").write_text(json.dumps(codes))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, Path]]:
    """Exit code, output of all runs, and run directory of each recipe after two steps."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        [
            "run",
            str(RECIPES / f"{name}.yaml"),
            f"logger.log_dir={folder / name}",
            f"policy.model_name={REPO / 'models' / model}",
            *SMALL,
        ]
        for name, model in RUNNABLE.items()
    ]
    done = subprocess.run(
        [sys.executable, "-c", ALL_RUNS, json.dumps(runs)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    codes = json.loads((folder / "codes.json").read_text())
    return {name: (code, done.stderr, folder / name) for name, code in zip(RUNNABLE, codes, strict=True)}


@pytest.mark.parametrize("name", RUNNABLE)
def test_recipe_trains_two_steps(outcomes: dict[str, tuple[int, str, Path]], name: str) -> None:
    code, stderr, run_dir = outcomes[name]
    assert code == 0, stderr[-4000:]
    rows = metrics(run_dir)
    assert [row["step"] for row in rows] == [1, 2]
    # Trainer and engine hold the same weights in float32, in every layout: what they disagree by is rounding.
    assert all(row["train/gen_kl_error"] < 1e-9 for row in rows)
    assert [row["train/weight_version"] for row in rows] == [1, 2]
    # 16 samples of 24 prompt tokens and at least one response token.
    assert all(row["performance/total_num_tokens"] >= 16 * 25 for row in rows)


def test_dynamic_sampling_trains_on_groups_that_differ(outcomes: dict[str, tuple[int, str, Path]]) -> None:
    rows = metrics(outcomes["grpo-tiny-moe-cpu-dynamic-sampling"][2])
    assert all(row["train/grad_norm"] > 0 and 0 < row["train/reward"] < 1 for row in rows)
