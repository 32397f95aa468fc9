"""The generator over two engines in Ray actors, fed by the synchronizer. Real Ray, real vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from transformers import PreTrainedModel

from nemo_rl_moe.cluster.ray_cluster import reserve_devices
from nemo_rl_moe.cluster.worker_group import WorkerGroup, WorkerSpec
from nemo_rl_moe.data.prompt import Prompt
from nemo_rl_moe.errors import PhaseTimeout, RunFailed
from nemo_rl_moe.generation.generator import Generator
from nemo_rl_moe.generation.interface import SamplingSpec
from nemo_rl_moe.recipe.schema import Recipe
from nemo_rl_moe.refit.synchronizer import WeightSynchronizer
from tests.shared_ray import ensure_ray
from tests.unit.generation.engine_process import ENVIRONMENT, Engine
from tests.unit.generation.model_sender import ModelSender
from tests.unit.generation.tiny_qwen import (
    make_model,
    random_prompts,
    tiny_recipe,
    worst_logprob_error,
)

SPEC = SamplingSpec(1.0, 16, 2, seed=0)


@pytest.fixture(scope="module")
def recipe(moe_folder) -> Recipe:
    return Recipe.model_validate(tiny_recipe(moe_folder))


@pytest.fixture(scope="module")
def workers(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerGroup]:
    """Two engines."""
    cluster = recipe.cluster.model_copy(update={"gpus_per_node": 2})
    ensure_ray()
    plain = recipe.model_dump(mode="json")
    with reserve_devices(cluster) as placement:
        specs = [WorkerSpec(bundle=r, num_cpus=1, num_gpus=0, args=(plain, r)) for r in range(2)]
        group = WorkerGroup(
            "generation",
            "nemo_rl_moe.generation.vllm_worker.VllmWorker",
            specs,
            placement,
            ENVIRONMENT,
            tmp_path_factory.mktemp("logs"),
        )
        group.call("setup", phase="start", timeout_s=180)
        yield group
        group.kill()


@pytest.fixture
def generator(workers: WorkerGroup, recipe: Recipe) -> Generator:
    return Generator(workers, recipe)


@pytest.fixture
def sync() -> Iterator[Callable[..., int]]:
    """Hands a model's weights over as the next version; returns it. The buffers stay until the test ends."""
    synchronizers = []

    def run(generator: Generator, model: PreTrainedModel) -> int:
        wanted = max(generator.weight_versions()) + 1
        sender = ModelSender(model)
        synchronizers.append(WeightSynchronizer(sender, generator))
        report = synchronizers[-1].sync(wanted)
        assert report.version == wanted
        assert report.nbytes == sender.weight_layout().nbytes
        assert report.export_s > 0
        assert report.load_s > 0
        return wanted

    yield run
    for synchronizer in synchronizers:
        synchronizer.close()


def as_prompts(token_ids: list[list[int]]) -> list[Prompt]:
    """Prompts with ids 0, 1, ..."""
    return [Prompt(id=i, token_ids=ids, text="", env_name="math") for i, ids in enumerate(token_ids)]


def test_two_synced_engines_give_in_order_what_one_engine_gives(
    generator: Generator, engine: Engine, sync: Callable[..., int]
) -> None:
    model, prompts = make_model("moe", 50), random_prompts(9, seed=51)
    version = sync(generator, model)
    assert generator.weight_versions() == [version, version]
    engine.refit(model)
    completions, alone = generator.generate(as_prompts(prompts), SPEC), engine.generate(prompts, SPEC)
    assert np.array_equal(completions.lengths, alone.lengths)
    assert np.array_equal(completions.token_ids, alone.token_ids)
    assert np.abs(completions.logprobs - alone.logprobs).max() <= 5e-5
    assert completions.weight_versions.tolist() == [version] * 18
    assert worst_logprob_error(model, prompts, completions, SPEC) <= 5e-5


def test_the_same_prompt_twice_in_a_step_gets_4_different_responses(generator: Generator) -> None:
    (tokens,) = random_prompts(1, seed=52)
    row = as_prompts([tokens])[0]
    completions = generator.generate([row, row], SPEC)
    responses = np.split(completions.token_ids, np.cumsum(completions.lengths)[:-1])
    assert len({tuple(r.tolist()) for r in responses}) == 4
    once = generator.generate([row], SPEC)
    assert np.array_equal(once.token_ids, np.concatenate(responses[:2]))


def test_fewer_prompts_than_engines_and_none_at_all_work(generator: Generator) -> None:
    assert generator.generate(as_prompts([[5, 6, 7]]), SPEC).lengths.shape == (2,)
    assert generator.generate([], SPEC).lengths.shape == (0,)


def test_an_update_past_its_limit_of_1_ms_names_phase_and_ranks_and_ends_generation(
    workers: WorkerGroup, recipe: Recipe
) -> None:
    timeouts = recipe.cluster.timeouts.model_copy(update={"refit_s": 0.001})
    hasty = Generator(
        workers, recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update={"timeouts": timeouts})})
    )
    version = max(Generator(workers, recipe).weight_versions()) + 1
    synchronizer = WeightSynchronizer(ModelSender(make_model("moe", 53)), hasty)
    with pytest.raises(PhaseTimeout, match=f"refit: weight update to version {version}: .* generation rank 0, 1"):
        synchronizer.sync(version)
    with pytest.raises(RuntimeError, match=f"generator is unusable: refit: weight update to version {version}"):
        hasty.generate(as_prompts([[5]]), SPEC)
    # The engines themselves finish the update behind the timeout.
    assert Generator(workers, recipe).weight_versions() == [version, version]
    synchronizer.close()


def test_an_update_with_another_models_layout_fails_naming_rank_and_tensor(
    workers: WorkerGroup, recipe: Recipe, sync: Callable[..., int]
) -> None:
    generator = Generator(workers, recipe)
    unusable = r"generation rank [01]: generation worker [01] is unusable: .*experts: 0 elements, the model has 98304"
    with pytest.raises(RunFailed, match=unusable):
        sync(generator, make_model("dense", 54))
    with pytest.raises(RunFailed, match="generator is unusable"):
        generator.generate(as_prompts([[5]]), SPEC)
    # A new facade does not forget it either: the engines know.
    with pytest.raises(RuntimeError, match=r"generation worker [01] is unusable"):
        Generator(workers, recipe).generate(as_prompts([[5], [6]]), SPEC)
