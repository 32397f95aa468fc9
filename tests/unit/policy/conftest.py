"""Trainer processes and tiny models shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.policy.local_workers import LocalWorkers
from tests.unit.policy.ranks import Ranks
from tests.unit.policy.tiny_models import save_model


@pytest.fixture(scope="module")
def solo() -> Iterator[LocalWorkers]:
    """One trainer process."""
    workers = LocalWorkers(1)
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[LocalWorkers]:
    """Two trainer processes."""
    workers = LocalWorkers(2)
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def quartet() -> Iterator[LocalWorkers]:
    """Four trainer processes."""
    workers = LocalWorkers(4)
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-MoE, untied: 2 layers, 8 experts, top 2, vocabulary 256."""
    folder = tmp_path_factory.mktemp("moe")
    save_model(folder, "moe")
    return folder


@pytest.fixture(scope="session")
def dense_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dense Qwen3, tied: 2 layers, vocabulary 256."""
    folder = tmp_path_factory.mktemp("dense")
    save_model(folder, "dense", tied=True)
    return folder


@pytest.fixture(scope="session")
def one_rank() -> Iterator[Ranks]:
    """One bare Megatron rank."""
    ranks = Ranks(1)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four bare Megatron ranks."""
    ranks = Ranks(4)
    yield ranks
    ranks.close()
