"""Risk guarded: a colocated generator keeps the card's memory while the trainer works, or wakes with other weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_rl_moe.generation.interface import SamplingSpec
from nemo_rl_moe.generation.sleep import KV_CACHE, WEIGHTS
from nemo_rl_moe.generation.vllm_worker import VllmWorker
from nemo_rl_moe.refit.digest import weight_digest
from nemo_rl_moe.refit.layout import WeightLayout
from nemo_rl_moe.refit.shared_memory import SharedBuffer
from tests.unit.generation.tiny_qwen import checkpoint_tensors, make_model, random_prompts, save_model, tiny_recipe

MIB = 1 << 20
CACHE = 512 * MIB
PROMPTS = random_prompts(8, seed=1)
SPEC = SamplingSpec(0.0, 16, 1, seed=3)


def used_bytes() -> int:
    """Of the whole card: the engine's memory is not torch's."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def sample(worker: VllmWorker) -> np.ndarray:
    lengths = np.array([len(p) for p in PROMPTS], dtype=np.int64)
    tokens = np.array([t for p in PROMPTS for t in p], dtype=np.int32)
    return worker.generate(np.arange(len(PROMPTS), dtype=np.int64), lengths, tokens, SPEC).token_ids


def update(worker: VllmWorker, version: int) -> None:
    tensors = checkpoint_tensors(make_model("moe", 11))
    layout = WeightLayout.build((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
    with SharedBuffer.create(layout.nbytes) as buffer:
        for name, view in layout.views(buffer.tensor).items():
            view.copy_(tensors[name])
        digest = weight_digest(layout.views(buffer.tensor), version)
        worker.update_weights({"layout": layout.to_plain(), "digest": digest, "path": str(buffer.path)}, version)


@pytest.mark.gpu("vLLM's CPU worker has no memory that it could give back")
def test_a_sleeping_engine_gives_back_its_512_mib_cache_and_samples_the_same_tokens_after_waking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    recipe = tiny_recipe(save_model(make_model("moe", 11), tmp_path))
    recipe["cluster"]["device"] = "cuda"
    recipe["policy"]["generation"]["vllm_cfg"] |= {"kv_cache_memory_bytes": CACHE, "enforce_eager": True}
    worker = VllmWorker(recipe, 0)
    worker.setup()
    try:
        update(worker, 1)
        before, awake = sample(worker), used_bytes()
        worker.sleep()
        assert awake - used_bytes() >= CACHE - 16 * MIB
        worker.wake([WEIGHTS])
        update(worker, 2)
        assert awake - used_bytes() >= CACHE - 32 * MIB  # the weights are back, the cache is not
        worker.wake([KV_CACHE])
        assert np.array_equal(sample(worker), before)
    finally:
        worker.shutdown()
