"""Prompts of each step, in an order that a resumed run repeats exactly."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_rl_moe.data.prompt import Prompt
from nemo_rl_moe.errors import UserError


class PromptLoader(Iterator[list[Prompt]]):
    """An iterator over lists of `prompts_per_step` prompts.

    The order of epoch e is a function of (seed, e) alone, so the whole state is one number: how many prompts were
    given out. A step that an epoch cannot fill goes on with the first prompts of the next one, so every prompt comes
    exactly once in each epoch. After `max_epochs` a rest that does not fill a step is left out: a smaller batch would
    not divide over the ranks.

    Args:
        prompts: all prompts of the dataset.
        prompts_per_step: prompts in each list.
        seed: of the shuffled order.
        shuffle: a new random order in each epoch; off keeps the dataset's order.
        max_epochs: passes over the prompts.
    """

    def __init__(
        self, prompts: Sequence[Prompt], prompts_per_step: int, seed: int, shuffle: bool = True, max_epochs: int = 1
    ) -> None:
        if len(prompts) < prompts_per_step:
            raise UserError(f"{len(prompts)} prompts do not fill a step of {prompts_per_step}")
        self.prompts = list(prompts)
        self.prompts_per_step = prompts_per_step
        self.seed = seed
        self.shuffle = shuffle
        self.max_epochs = max_epochs
        self.position = 0
        self._order: tuple[int, NDArray[np.int64]] | None = None
        self._fingerprint: str | None = None

    @property
    def epoch(self) -> int:
        """Epoch of the next prompt, from 0."""
        return self.position // len(self.prompts)

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 of everything in the prompts: ids, tokens, environment and verifier data."""
        if self._fingerprint is None:
            digest = hashlib.sha256()
            for p in self.prompts:
                row = [p.id, p.token_ids, p.env_name, p.metadata]
                digest.update(json.dumps(row, sort_keys=True, default=str).encode())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def __next__(self) -> list[Prompt]:
        """The next step's prompts. Raises StopIteration after the last full step of the last epoch."""
        end = self.position + self.prompts_per_step
        if end > self.max_epochs * len(self.prompts):
            raise StopIteration
        batch = [self._prompt_at(position) for position in range(self.position, end)]
        self.position = end
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON data from which `load_state_dict` goes on with the prompt after the last one given out."""
        return {
            "position": self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "num_prompts": len(self.prompts),
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where the state was taken. The step size may differ: the state counts prompts.

        Raises:
            UserError: the state is of other prompts or of another order; going on would skip and repeat prompts.
        """
        if state["fingerprint"] != self.fingerprint:
            raise UserError(
                f"the checkpoint was made with other training prompts ({state['num_prompts']} of them, here are "
                f"{len(self.prompts)}; data, chat template or tokenizer changed): resume with the same, or start anew"
            )
        for key, name, own in (("seed", "grpo.seed", self.seed), ("shuffle", "data.shuffle", self.shuffle)):
            if state[key] != own:
                raise UserError(
                    f"{name}: {own} here, {state[key]} in the checkpoint: the order of prompts would change"
                )
        self.position = int(state["position"])

    def _prompt_at(self, position: int) -> Prompt:
        epoch, offset = divmod(position, len(self.prompts))
        if not self.shuffle:
            return self.prompts[offset]
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self.prompts)))
        return self.prompts[self._order[1][offset]]
