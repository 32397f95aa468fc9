"""The generator as the driver sees it: all generation workers as one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nemo_rl_moe.cluster.worker_group import WorkerGroup
from nemo_rl_moe.data.prompt import Prompt
from nemo_rl_moe.errors import PhaseTimeout
from nemo_rl_moe.generation.interface import Completions, SamplingSpec
from nemo_rl_moe.recipe.schema import Recipe
from nemo_rl_moe.refit.layout import WeightLayout


class Generator:
    """Splits prompts over the workers and keeps their weights at one version.

    Args:
        workers: group that hosts `nemo_rl_moe.generation.vllm_worker.VllmWorker`.
        recipe: the run's recipe.
    """

    def __init__(self, workers: WorkerGroup, recipe: Recipe) -> None:
        self._workers = workers
        self._timeouts = recipe.cluster.timeouts
        self._failure: str | None = None

    def setup(self) -> list[dict[str, float]]:
        """Starts every engine. Returns what each worker's `setup` gives, by rank."""
        return self._workers.call("setup", phase="generation: engine start", timeout_s=self._timeouts.setup_s)

    def generate(self, prompts: Sequence[Prompt], spec: SamplingSpec) -> Completions:
        """Samples `spec.n` responses for each prompt, in the order of the prompts.

        Raises:
            UserError: a prompt is empty or too long for the engine.
            PhaseTimeout: naming the workers that did not answer.
            RuntimeError: an engine is unusable, or the workers' weights have different versions.
        """
        if self._failure is not None:
            raise RuntimeError(f"the generator is unusable: {self._failure}")
        lengths = np.array([len(p.token_ids) for p in prompts], dtype=np.int64)
        ids = np.array([p.id for p in prompts], dtype=np.int64)
        first = first_samples(ids, spec.n)
        bounds = split_bounds(lengths, self._workers.size)
        arguments = [
            (ids[a:b], lengths[a:b], _flat_tokens(prompts[a:b]), spec, first[a:b])
            for a, b in itertools.pairwise(bounds)
        ]
        parts = self._workers.call(
            "generate", phase="generation", timeout_s=self._timeouts.generation_s, per_worker=arguments
        )
        completions = Completions.concat(parts)
        versions = sorted(set(completions.weight_versions.tolist()))
        if len(versions) > 1:
            raise RuntimeError(f"generation workers sampled with different weight versions: {versions}")
        return completions

    def update_weights(self, path: str, layout: WeightLayout, digest: str, version: int) -> list[dict[str, float]]:
        """Loads the weights in a shared buffer into every engine.

        Args:
            path: file of the buffer (`SharedBuffer.path`).
            layout: of the buffer.
            digest: `weight_digest` of the sender.
            version: version that the weights get.

        Returns:
            What each worker's `update_weights` gives, by rank.

        Raises:
            PhaseTimeout: naming the workers that did not answer; the generator then refuses to generate.
            RuntimeError: an update failed; so too.
        """
        phase = f"refit: weight update to version {version}"
        try:
            return self._workers.call(
                "update_weights",
                path,
                layout.to_plain(),
                digest,
                version,
                phase=phase,
                timeout_s=self._timeouts.refit_s,
            )
        except (RuntimeError, PhaseTimeout) as error:
            # Some engines may hold the new weights and some the old or half of each.
            self._failure = f"{phase} failed: {error}"
            raise

    def weight_versions(self) -> list[int]:
        """Version of each worker's weights, by rank."""
        return self._workers.call("weight_version", phase="refit: weight versions", timeout_s=self._timeouts.refit_s)

    def sleep(self) -> None:
        """Gives the devices' memory to the trainer; does nothing on a CPU."""
        self._workers.call("sleep", phase="generation: sleep", timeout_s=self._timeouts.refit_s)

    def wake(self, tags: list[str] | None = None) -> None:
        """Takes the memory again (see `VllmWorker.wake`); does nothing on a CPU."""
        self._workers.call("wake", tags, phase="generation: wake", timeout_s=self._timeouts.refit_s)

    def shutdown(self) -> None:
        """Ends every engine."""
        self._workers.call("shutdown", phase="generation: shutdown", timeout_s=self._timeouts.refit_s)


def first_samples(prompt_ids: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """int64 [P]: number of each prompt's first response, n more for each earlier prompt with the same id."""
    seen: dict[int, int] = {}
    first = np.zeros(len(prompt_ids), dtype=np.int64)
    for row, prompt in enumerate(prompt_ids.tolist()):
        first[row] = seen.get(prompt, 0)
        seen[prompt] = seen.get(prompt, 0) + n
    return first


def split_bounds(lengths: NDArray[np.int64], parts: int) -> list[int]:
    """[parts + 1] bounds of contiguous parts with about the same number of tokens in each.

    Args:
        lengths: int64 [P], tokens of each prompt.
        parts: number of parts; some are empty when there are fewer prompts.
    """
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    # Each prompt goes where its middle lies, so that a part is off by half a prompt at most on either side.
    middles = ends - lengths / 2
    inner = [int(np.searchsorted(middles, total * part / parts)) for part in range(1, parts)]
    return [0, *inner, len(lengths)]


def _flat_tokens(prompts: Sequence[Prompt]) -> NDArray[np.int32]:
    if not prompts:
        return np.zeros(0, dtype=np.int32)
    return np.concatenate([np.asarray(p.token_ids, dtype=np.int32) for p in prompts])
