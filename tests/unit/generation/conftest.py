"""One process and one MoE engine for all tests of this folder; other engines join the same process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.unit.generation.engine_process import Engine, EngineProcess
from tests.unit.generation.tiny_qwen import make_model, save_model, tiny_recipe


@pytest.fixture(scope="session")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of `make_model("moe", 0)`."""
    return save_model(make_model("moe", 0), tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="session")
def engine_process() -> Iterator[EngineProcess]:
    """The child process; it ends with the session."""
    process = EngineProcess()
    yield process
    process.close()


@pytest.fixture(scope="session")
def engine(engine_process: EngineProcess, moe_folder: Path) -> Engine:
    """The MoE engine that tests share: any may refit it, so none may assume its weights or version."""
    return Engine(engine_process, "moe", tiny_recipe(moe_folder))


@pytest.fixture
def new_engine(
    engine_process: EngineProcess, moe_folder: Path, request: pytest.FixtureRequest
) -> Callable[..., Engine]:
    """Makes an engine of the test's own, from the MoE checkpoint unless another folder is given."""

    def make(folder: Path | None = None, **generation: object) -> Engine:
        return Engine(engine_process, request.node.name, tiny_recipe(folder or moe_folder, **generation))

    return make


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """The reference models are tiny; more threads only take the cores from the engine."""
    torch.set_num_threads(1)
