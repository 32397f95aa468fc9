"""Trainer processes and tiny models shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.policy.local_workers import LocalWorkers


@pytest.fixture(scope="session")
def solo() -> Iterator[LocalWorkers]:
    """One trainer process."""
    workers = LocalWorkers(1)
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def pair() -> Iterator[LocalWorkers]:
    """Two trainer processes."""
    workers = LocalWorkers(2)
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-MoE, untied: 2 layers, 8 experts, top 2, vocabulary 256."""
    return _save(tmp_path_factory.mktemp("models") / "moe-untied", moe=True)


@pytest.fixture(scope="session")
def dense_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dense Qwen3, tied: 2 layers, vocabulary 256."""
    return _save(tmp_path_factory.mktemp("models") / "dense-tied", moe=False)


def _save(folder: Path, moe: bool) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = {
        "vocab_size": 256,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": not moe,
        "initializer_range": 0.08,
    }
    torch.manual_seed(0)
    if moe:
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts)).float().save_pretrained(folder)
    else:
        Qwen3ForCausalLM(Qwen3Config(**shape)).float().save_pretrained(folder)
    return folder
