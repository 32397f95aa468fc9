"""Risk guarded: trainer and generator disagree about the probability of the same tokens, at first or after a refit.

The real actors on real Ray: Megatron trains, vLLM samples, transformers is the judge of both.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from nemo_rl_moe.batch import SequenceBatch
from nemo_rl_moe.cluster.ray_cluster import reserve_devices
from nemo_rl_moe.data.prompt import Prompt
from nemo_rl_moe.generation.interface import SamplingSpec
from nemo_rl_moe.loops.assemble import assemble
from nemo_rl_moe.loops.build import start_workers
from nemo_rl_moe.recipe.load import load_recipe
from nemo_rl_moe.recipe.plan import plan
from nemo_rl_moe.refit.shared_memory import SharedBuffer
from nemo_rl_moe.refit.synchronizer import WeightSynchronizer
from tests.functional.cli import MODEL, TINY
from tests.shared_ray import ensure_ray

TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory):
    overrides = [
        f"policy.model_name={MODEL}",
        f"policy.generation.temperature={TEMPERATURE}",
        "policy.megatron_cfg.optimizer.lr=0.003",
        "policy.train_global_batch_size=16",
        "grpo.num_prompts_per_step=4",
        "grpo.num_generations_per_prompt=4",
    ]
    loaded = load_recipe(TINY, overrides)
    logs = tmp_path_factory.mktemp("logs")
    with contextlib.ExitStack() as stack:
        ensure_ray()
        placement = stack.enter_context(reserve_devices(loaded.recipe.cluster))
        policy, generator = start_workers(stack, loaded.recipe, plan(loaded.recipe), placement, logs, print)
        synchronizer = WeightSynchronizer(policy, generator)
        stack.callback(synchronizer.close)
        yield policy, generator, synchronizer


def sample(generator, seed: int) -> SequenceBatch:
    rng = np.random.default_rng(seed)
    prompts = [Prompt(i, rng.integers(3, 500, size=rng.integers(4, 30)).tolist(), "", "math") for i in range(4)]
    spec = SamplingSpec(TEMPERATURE, max_new_tokens=12, n=4, seed=seed)
    return assemble(prompts, generator.generate(prompts, spec), spec.n)


def huggingface_logprobs(folder: Path, batch: SequenceBatch) -> np.ndarray:
    """float32 [T] of transformers' own model, one sequence at a time, nothing padded."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    with torch.no_grad():
        for tokens in np.split(batch.tokens, batch.offsets[1:-1]):
            ids = torch.from_numpy(tokens.astype(np.int64))
            logits = model(ids[None]).logits[0, :-1] / TEMPERATURE
            chosen = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
            rows.append(torch.cat([torch.zeros(1), chosen]))
    return torch.cat(rows).numpy()


def exported_folder(policy, folder: Path) -> Path:
    """The trainer's present weights as a Hugging Face checkpoint."""
    layout = policy.weight_layout()
    buffer = SharedBuffer.create(layout.nbytes)
    try:
        policy.export_weights(str(buffer.path))
        save_file({n: t.clone() for n, t in layout.views(buffer.tensor).items()}, folder / "model.safetensors")
    finally:
        buffer.close()
    (folder / "config.json").write_text((MODEL / "config.json").read_text())
    return folder


def largest_difference(a: np.ndarray, b: np.ndarray, mask: np.ndarray) -> float:
    return float(np.abs(a - b)[mask].max())


def test_three_versions_of_the_weights_give_equal_logprobs_in_all_three_to_5e_5(parts, tmp_path: Path) -> None:
    policy, generator, synchronizer = parts
    previous = None
    for version in (1, 2, 3):
        synchronizer.sync(version)
        batch = sample(generator, seed=version)
        folder = tmp_path / str(version)
        folder.mkdir()
        truth = huggingface_logprobs(exported_folder(policy, folder), batch)
        sampled = batch.token_mask
        assert set(batch.sample_values["weight_versions"]) == {version}
        assert largest_difference(batch.token_values["generation_logprobs"], truth, sampled) <= 5e-5
        trained = policy.logprobs(batch)
        assert largest_difference(trained, truth, sampled) <= 5e-5
        reference = policy.logprobs(batch, reference=True)
        assert largest_difference(reference, huggingface_logprobs(MODEL, batch), sampled) <= 5e-5
        if previous is not None:
            # The weights did change, so agreement above is not agreement about the old ones.
            assert largest_difference(huggingface_logprobs(previous, batch), truth, sampled) > 1e-2
        previous = folder
        advantages = np.repeat(np.resize([1.0, -1.0], len(batch)), batch.lengths).astype(np.float32)
        values = {"advantages": advantages, "prev_logprobs": trained, "reference_logprobs": reference}
        policy.train(batch.with_values(values))
