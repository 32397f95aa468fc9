"""Risks of updates under load: stale keys and values, a sample whose tokens are credited to the wrong weights, samples
lost with a worker. Real Ray, real AsyncLLM, two workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import PreTrainedModel

from nemo_rl_moe.cluster.ray_cluster import reserve_devices
from nemo_rl_moe.cluster.worker_group import WorkerFailed, WorkerGroup, WorkerSpec
from nemo_rl_moe.data.prompt import Prompt
from nemo_rl_moe.errors import RunFailed
from nemo_rl_moe.generation.dispatcher import Dispatcher
from nemo_rl_moe.generation.generator import Generator, worker_arguments
from nemo_rl_moe.generation.interface import Completions, SamplingSpec
from nemo_rl_moe.recipe.schema import Recipe
from nemo_rl_moe.refit.synchronizer import WeightSynchronizer
from tests.shared_ray import ensure_ray
from tests.unit.generation.engine_process import ENVIRONMENT, Engine
from tests.unit.generation.model_sender import ModelSender
from tests.unit.generation.tiny_qwen import make_model, random_prompts, tiny_recipe, worst_logprob_error

TOLERANCE = 5e-5
SPEC = SamplingSpec(1.0, 24, 2, seed=0)
LONG = SamplingSpec(1.0, 150, 4, seed=1)
# Three whole cache blocks, so that a request could take them from an earlier one.
PROMPTS = random_prompts(4, seed=70, shortest=96, longest=100)


@pytest.fixture(scope="module")
def recipe(moe_folder: Path) -> Recipe:
    """Two failures are allowed between two steps."""
    plain = tiny_recipe(moe_folder, colocated={"enabled": False, "resources": {"gpus_per_node": 1}})
    plain["grpo"] = {"async_grpo": {"enabled": True, "max_generation_failures": 2}}
    return Recipe.model_validate(plain)


@pytest.fixture(scope="module")
def workers(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerGroup]:
    """Two async engines."""
    ensure_ray()
    plain = recipe.model_dump(mode="json")
    with reserve_devices(recipe.cluster.model_copy(update={"gpus_per_node": 2})) as placement:
        group = WorkerGroup(
            "generation",
            "tests.unit.generation.switchable_worker.SwitchableWorker",
            [WorkerSpec(bundle=r, num_cpus=1, num_gpus=0, args=(plain, r)) for r in range(2)],
            placement,
            ENVIRONMENT,
            tmp_path_factory.mktemp("logs"),
            concurrent=True,
        )
        group.call("setup", phase="start", timeout_s=180)
        yield group
        group.kill()


@pytest.fixture(scope="module")
def events() -> list[str]:
    return []


@pytest.fixture(scope="module")
def generator(workers: WorkerGroup, recipe: Recipe, events: list[str]) -> Generator:
    return Generator(workers, recipe, events.append)


@pytest.fixture(scope="module")
def refit(generator: Generator) -> Iterator[Callable[[PreTrainedModel], int]]:
    """Hands a model's weights over as the next version; returns it. The buffers stay until the end."""
    synchronizers = []

    def run(model: PreTrainedModel) -> int:
        synchronizers.append(WeightSynchronizer(ModelSender(model), generator))
        return synchronizers[-1].sync(max(generator.weight_versions()) + 1).version

    yield run
    for synchronizer in synchronizers:
        synchronizer.close()


def as_prompts(token_ids: list[list[int]]) -> list[Prompt]:
    return [Prompt(id=i, token_ids=ids, text="", env_name="math") for i, ids in enumerate(token_ids)]


def errors_by_token(models: dict[int, PreTrainedModel], completions: Completions, spec: SamplingSpec) -> np.ndarray:
    """float64 [T]: difference of each token's log-probability from that under the weights it is credited to."""
    errors, start = [], 0
    for row, length in enumerate(completions.lengths.tolist()):
        prompt, response = PROMPTS[row // spec.n], completions.token_ids[start : start + length]
        tokens = torch.tensor(prompt + response.tolist())
        expected = {}
        for version, model in models.items():
            with torch.no_grad():
                logits = model(tokens[None]).logits[0, len(prompt) - 1 : -1] / spec.temperature
            expected[version] = torch.log_softmax(logits, -1).gather(-1, tokens[len(prompt) :, None])[:, 0].numpy()
        versions = completions.token_versions[start : start + length]
        own = np.array([expected[version][i] for i, version in enumerate(versions.tolist())])
        errors.append(np.abs(own - completions.logprobs[start : start + length]))
        start += length
    return np.concatenate(errors)


def wait_for_tokens(workers: WorkerGroup, rank: int, count: int) -> None:
    """Returns when a running response of the worker has as many tokens, long before it ends."""
    for _ in range(3000):
        if workers.call_rank(rank, "most_sampled", phase="look", timeout_s=10) >= count:
            return
        time.sleep(0.002)
    raise AssertionError(f"rank {rank} never had a response of {count} tokens under way")


def update_under_load(
    workers: WorkerGroup, refit: Callable[[PreTrainedModel], int], seed: int, **settings: object
) -> tuple[dict[int, PreTrainedModel], Completions, Completions]:
    """Samples long responses on worker 0 and updates meanwhile.

    Returns:
        The models by version, the samples that were running, and samples of the same prompts sent right afterwards.
    """
    workers.call("set_updates", phase="settings", timeout_s=10, **settings)
    old, new = make_model("moe", seed), make_model("moe", seed + 1)
    version = refit(old)
    arguments = worker_arguments(as_prompts(PROMPTS), LONG, np.zeros(4, dtype=np.int64))
    running = workers.submit(0, "generate", *arguments, together=False)
    wait_for_tokens(workers, 0, 8)
    assert refit(new) == version + 1
    later = workers.submit(0, "generate", *arguments, together=False)
    workers.wait_any([later], time.monotonic() + 60, "generation", 60)
    workers.wait_any([running], time.monotonic() + 60, "generation", 60)
    results = [workers.result(call, "generation") for call in (running, later)]
    return {version: old, version + 1: new}, *results


def test_a_step_sent_together_has_the_bits_of_the_sync_engine(
    generator: Generator, engine: Engine, refit: Callable[[PreTrainedModel], int]
) -> None:
    model, prompts = make_model("moe", 60), random_prompts(9, seed=61)
    version = refit(model)
    engine.refit(model)
    # The sync engine gets what worker 0 and worker 1 get: batches of another make-up may differ in the last bit.
    arguments = generator.arguments(as_prompts(prompts), SPEC)
    completions, first = generator.generate(as_prompts(prompts), SPEC), 0
    alone = []
    for own in arguments:
        rows = range(first, first + len(own[0]))
        alone.append(engine.generate([prompts[row] for row in rows], SPEC, ids=list(rows)))
        first += len(own[0])
    expected = Completions.concat(alone)
    assert np.array_equal(completions.token_ids, expected.token_ids)
    assert np.array_equal(completions.logprobs, expected.logprobs)
    assert completions.weight_versions.tolist() == [version] * 18


@pytest.mark.parametrize("silent", [False, True])
def test_in_flight_tokens_match_the_version_that_sampled_them_to_5e_5_when_the_cache_is_recomputed(
    workers: WorkerGroup, refit: Callable[[PreTrainedModel], int], silent: bool
) -> None:
    """Also with our own count of the tokens at the update, which vLLM before 0.32 needs."""
    workers.call("set_silent", silent, phase="settings", timeout_s=10)
    models, running, later = update_under_load(
        workers, refit, 62, in_flight_weight_updates=True, recompute_kv_cache_after_weight_updates=True
    )
    workers.call("set_silent", False, phase="settings", timeout_s=10)
    assert set(running.token_versions.tolist()) == set(models)
    assert errors_by_token(models, running, LONG).max() <= TOLERANCE
    assert set(later.token_versions.tolist()) == {max(models)}
    assert errors_by_token(models, later, LONG).max() <= TOLERANCE


def test_in_flight_new_requests_never_use_the_cache_that_running_ones_keep(
    workers: WorkerGroup, refit: Callable[[PreTrainedModel], int]
) -> None:
    models, running, later = update_under_load(
        workers, refit, 64, in_flight_weight_updates=True, recompute_kv_cache_after_weight_updates=False
    )
    old = running.token_versions == min(models)
    assert 0 < old.sum() < len(old)
    errors = errors_by_token(models, running, LONG)
    assert errors[old].max() <= TOLERANCE
    # The later tokens are by the new weights over keys and values of the old: of neither model alone.
    assert errors[~old].max() > 100 * TOLERANCE
    assert set(later.token_versions.tolist()) == {max(models)}
    assert errors_by_token(models, later, LONG).max() <= TOLERANCE


def test_an_update_that_waits_leaves_running_samples_to_the_old_version(
    workers: WorkerGroup, refit: Callable[[PreTrainedModel], int]
) -> None:
    settings = {"in_flight_weight_updates": False, "running_requests": "wait"}
    models, running, later = update_under_load(workers, refit, 66, **settings)
    assert set(running.token_versions.tolist()) == {min(models)}
    assert errors_by_token(models, running, LONG).max() <= TOLERANCE
    assert errors_by_token(models, later, LONG).max() <= TOLERANCE


def test_an_update_that_aborts_samples_the_same_prompts_again_with_the_new_version(
    workers: WorkerGroup, refit: Callable[[PreTrainedModel], int]
) -> None:
    settings = {"in_flight_weight_updates": False, "running_requests": "abort"}
    models, running, _ = update_under_load(workers, refit, 68, **settings)
    assert len(running.lengths) == 16
    assert set(running.token_versions.tolist()) == {max(models)}
    assert errors_by_token(models, running, LONG).max() <= TOLERANCE


@pytest.mark.parametrize("routing", ["least_loaded", "round_robin"])
def test_8_prompts_go_to_2_idle_workers_in_turns(generator: Generator, recipe: Recipe, routing: str) -> None:
    ahead = recipe.grpo.async_grpo.model_copy(update={"request_routing": routing})
    changed = recipe.model_copy(update={"grpo": recipe.grpo.model_copy(update={"async_grpo": ahead})})
    dispatcher: Dispatcher[int] = Dispatcher(generator, changed)
    for prompt in as_prompts(random_prompts(8, seed=71)):
        dispatcher.send(prompt.id, prompt, SPEC, 0)
    assert sorted(call.rank for call in dispatcher._pending) == [0] * 4 + [1] * 4
    answers = []
    while len(dispatcher):
        answers += dispatcher.collect(1.0)
    assert sorted(answer.tag for answer in answers) == list(range(8))


def test_the_samples_of_a_killed_worker_come_from_its_successor_with_the_present_weights(
    workers: WorkerGroup,
    generator: Generator,
    recipe: Recipe,
    events: list[str],
    refit: Callable[[PreTrainedModel], int],
) -> None:
    model = make_model("moe", 72)
    version = refit(model)
    victim = psutil.Process(workers.pids()[1])
    family = [victim, *victim.children(recursive=True)]
    dispatcher: Dispatcher[Prompt] = Dispatcher(generator, recipe)
    prompts = as_prompts(PROMPTS)
    for prompt in prompts:
        dispatcher.send(prompt, prompt, LONG, 0)
    wait_for_tokens(workers, 1, 1)
    os.kill(victim.pid, signal.SIGKILL)
    done, failures = {}, 0
    while len(dispatcher):
        for answer in dispatcher.collect(1.0):
            if isinstance(answer.outcome, WorkerFailed):
                failures += generator.replace(answer.outcome)
                dispatcher.send(answer.tag, answer.tag, LONG, 0)
            else:
                done[answer.tag.id] = answer.outcome
    assert (sorted(done), failures) == ([0, 1, 2, 3], 1)
    assert [e for e in events if "generation rank 1 died" in e and "starting it anew (1 of at most 2" in e]
    completions = Completions.concat([done[i] for i in range(4)])
    assert set(completions.weight_versions.tolist()) == {version}
    assert worst_logprob_error(model, PROMPTS, completions, LONG) <= TOLERANCE
    _, alive = psutil.wait_procs(family, timeout=10)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


def test_a_worker_that_dies_before_an_update_is_replaced_by_it_and_a_third_failure_ends_the_run(
    workers: WorkerGroup, generator: Generator, refit: Callable[[PreTrainedModel], int]
) -> None:
    model = make_model("moe", 73)
    os.kill(workers.pids()[0], signal.SIGKILL)
    version = refit(model)
    assert generator.weight_versions() == [version, version]
    assert worst_logprob_error(model, PROMPTS, generator.generate(as_prompts(PROMPTS), SPEC), SPEC) <= TOLERANCE
    os.kill(workers.pids()[0], signal.SIGKILL)
    with pytest.raises(RunFailed, match=r"failed again, and grpo.async_grpo.max_generation_failures is 2: .*rank 0"):
        generator.generate(as_prompts(PROMPTS), SPEC)
