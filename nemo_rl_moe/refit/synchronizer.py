"""Policy -> generator: one call hands over the weights, checked to be whole and to be in every engine."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Protocol

from nemo_rl_moe.refit.digest import weight_digest
from nemo_rl_moe.refit.layout import WeightLayout
from nemo_rl_moe.refit.offer import SharedMemoryOffer, WeightOffer
from nemo_rl_moe.refit.shared_memory import SharedBuffer


class WeightSender(Protocol):
    """What is asked of the policy."""

    def weight_layout(self) -> WeightLayout:
        """Layout of the whole model in Hugging Face names and full shapes."""

    def export_weights(self, buffer_path: str) -> int:
        """Writes every tensor to its place in the file. Returns the elements that all ranks wrote together."""


class WeightReceiver(Protocol):
    """What is asked of the generator."""

    def weights_held(self) -> contextlib.AbstractContextManager[None]:
        """While held, nobody else reads the buffer, as an engine started anew would."""

    def update_weights(self, offer: WeightOffer) -> None:
        """Loads the weights; returns when all engines are at the offer's version."""

    def weight_versions(self) -> list[int]:
        """Version of each engine's weights."""


@dataclass(frozen=True)
class SyncReport:
    """What one hand-over took.

    Attributes:
        version: of the weights, in every engine.
        nbytes: size of the buffer.
        export_s: seconds from the trainer's parameters to the buffer.
        load_s: seconds from the buffer to engines that are ready to sample.
    """

    version: int
    nbytes: int
    export_s: float
    load_s: float


class WeightSynchronizer:
    """Owns the shared buffer of a run. All trainer and generation workers are on its host.

    Timeouts are those of the two sides (`cluster.timeouts.refit_s`): each names its phase and the late ranks.

    Args:
        policy: the sender.
        generator: the receiver.
    """

    def __init__(self, policy: WeightSender, generator: WeightReceiver) -> None:
        self._policy = policy
        self._generator = generator
        self._layout: WeightLayout | None = None
        self._buffer: SharedBuffer | None = None

    def sync(self, version: int) -> SyncReport:
        """Gives the policy's present weights to every engine as the version.

        Raises:
            UserError: shared memory has no room for the weights.
            PhaseTimeout: naming the phase and the workers that did not answer.
            RuntimeError: the trainer wrote more or fewer elements than the model has, the update failed, or an engine
                reports another version afterwards.
        """
        layout, buffer = self._prepare()
        with self._generator.weights_held():
            started = time.perf_counter()
            written = self._policy.export_weights(str(buffer.path))
            if written != layout.numel:
                # Unwritten elements keep an earlier version's value; a model of mixed versions samples plausible text.
                raise RuntimeError(
                    f"refit to version {version}: the trainer wrote {written} of {layout.numel} elements"
                )
            exported = time.perf_counter()
            digest = weight_digest(layout.views(buffer.tensor), version)
            self._generator.update_weights(SharedMemoryOffer(str(buffer.path), layout, digest, version))
            loaded = time.perf_counter()
        versions = self._generator.weight_versions()
        if versions != [version] * len(versions):
            raise RuntimeError(f"refit to version {version}: the generation workers report versions {versions}")
        return SyncReport(version, layout.nbytes, exported - started, loaded - exported)

    def close(self) -> None:
        """Removes the buffer."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    def _prepare(self) -> tuple[WeightLayout, SharedBuffer]:
        if self._layout is None or self._buffer is None:
            self._layout = self._policy.weight_layout()
            self._buffer = SharedBuffer.create(self._layout.nbytes)
        return self._layout, self._buffer
