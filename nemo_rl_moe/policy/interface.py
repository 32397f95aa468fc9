"""What the loops ask of a policy."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nemo_rl_moe.batch import FloatArray, SequenceBatch
from nemo_rl_moe.refit.layout import WeightLayout


class PolicyInterface(Protocol):
    """A policy that can be trained and whose weights can be handed to a generator."""

    def setup(self) -> None:
        """Builds the model on all workers and loads its weights."""

    def logprobs(self, batch: SequenceBatch, reference: bool = False) -> FloatArray:
        """float32 [T]: log-probability of each sampled token at the sampling temperature, 0 for other tokens."""

    def logprobs_and_routes(self, batch: SequenceBatch) -> tuple[FloatArray, NDArray[np.signedinteger]]:
        """The same of the policy, and the experts that each token went to: [T, L, K] as in SequenceBatch."""

    def train(self, batch: SequenceBatch) -> dict[str, float]:
        """One or more optimizer steps; returns their metrics."""

    def weight_layout(self) -> WeightLayout:
        """Layout of the whole model in Hugging Face names and full shapes."""

    def export_weights(self, buffer_path: str) -> int:
        """Writes every tensor to its place in the file; returns when all ranks are done."""

    def save_hf(self, folder: str) -> None:
        """Writes the weights as a Hugging Face model folder."""

    def save(self, folder: str) -> None:
        """Writes the trainer's whole state into the folder."""

    def load(self, folder: str) -> None:
        """Reads what `save` wrote."""
