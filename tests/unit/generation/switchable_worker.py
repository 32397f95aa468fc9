"""An async worker whose way of updating can be switched, so that one engine serves the tests of all ways."""

from __future__ import annotations

from typing import Any

from nemo_rl_moe.generation.async_vllm_worker import AsyncVllmWorker
from nemo_rl_moe.generation.token_versions import Span


class SwitchableWorker(AsyncVllmWorker):
    """The real worker, with the recipe's `grpo.async_grpo` open to change, and deaf to what vLLM says of versions."""

    silent = False

    def set_silent(self, silent: bool) -> None:
        """Whether the engine seems to say nothing of versions, as vLLM before 0.32 does."""
        self.silent = silent

    def _versions_of(self, queue: Any, output: Any) -> list[Span]:
        if self.silent:
            output.weight_versions = None
        return super()._versions_of(queue, output)

    def set_updates(self, **settings: object) -> None:
        """Replaces values of `grpo.async_grpo`."""
        grpo = self._recipe.grpo
        ahead = grpo.async_grpo.model_copy(update=settings)
        self._recipe = self._recipe.model_copy(update={"grpo": grpo.model_copy(update={"async_grpo": ahead})})

    def most_sampled(self) -> int:
        """Response tokens that the furthest of the running requests has so far; 0 when none runs."""
        running = self._engine.output_processor.request_states.values()
        return max((len(state.detokenizer.output_token_ids) for state in running), default=0)
