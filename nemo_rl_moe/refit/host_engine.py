"""vLLM's weight-transfer engine `host`: weights come through a buffer in shared host memory.

vLLM imports this module in its worker processes through `worker_extension_cls`, which registers the engine. It follows
vLLM's lifecycle (start, update, finish): plain `load_weights` on a live engine corrupts it.

Newer vLLM calls the engine at every phase. Version 0.24 prepares and finishes the model itself and calls only
`receive_weights`, with the function that loads; that way is written from its source and has not been run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from nemo_rl_moe.generation.vllm_compat import (
    cpu_reload_needs_help,
    repack_tied_head,
    reset_moe_kernels,
    vllm_version,
)
from nemo_rl_moe.refit.digest import check_digest
from nemo_rl_moe.refit.layout import WeightLayout, group_elements
from nemo_rl_moe.refit.shared_memory import AttachedBuffers

_TIED_HEAD = "lm_head.weight"


@dataclass
class HostInitInfo(WeightTransferInitInfo):
    """What the receiver must get in every update.

    Attributes:
        expected: elements by tensor group (see `group_elements`); empty checks nothing.
    """

    expected: dict[str, int] = field(default_factory=dict)


@dataclass
class HostUpdateInfo(WeightTransferUpdateInfo):
    """One update.

    Attributes:
        layout: `WeightLayout.to_plain()`.
        digest: `weight_digest` as the sender sees it.
        path: file of the shared buffer.
    """

    layout: list
    digest: dict[str, str]
    path: str


class HostWeightTransferEngine(WeightTransferEngine[HostInitInfo, HostUpdateInfo]):
    """Loads the model's weights from a shared buffer, on CPU and (through a host-to-device copy) on GPU."""

    init_info_cls = HostInitInfo
    update_info_cls = HostUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._buffers = AttachedBuffers()
        self._expected: dict[str, int] = {}
        self._version = vllm_version()

    @property
    def _tied(self) -> bool:
        return getattr(self.model.config, "tie_word_embeddings", False)

    def init_transfer_engine(self, init_info: HostInitInfo) -> None:
        """Takes the expected tensors; nothing is connected before the first update."""
        self._expected = init_info.expected

    def start_weight_update(self) -> None:
        """Puts the model back into the state in which a checkpoint can be loaded."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if cpu_reload_needs_help(self.device.type, self._version):
            reset_moe_kernels(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads one update; returns when the weights are on the device."""
        self.receive_weights(self.parse_update_info(update_info))
        # The base class synchronizes always, which raises on a machine without an accelerator.
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: HostUpdateInfo, load_weights: Callable[..., Any] | None = None) -> None:
        """Maps the buffer, checks that it is the sender's and complete, and loads every tensor.

        Args:
            update_info: the update.
            load_weights: takes (name, tensor) pairs; None is the model's own.

        Raises:
            ValueError: the layout lacks tensors or elements, has others, or the buffer is not the one that was sent.
        """
        layout = WeightLayout.from_plain(update_info.layout)
        self._check_complete(layout)
        tensors = layout.views(self._buffers.get(update_info.path, layout.nbytes))
        check_digest(tensors, update_info.digest)
        (load_weights or self.model.load_weights)(tensors.items())
        self._check_loaded()

    def finish_weight_update(self) -> None:
        """Packs the weights for the kernels where the device needs it."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        if self._tied and cpu_reload_needs_help(self.device.type, self._version):
            repack_tied_head(self.model)

    def shutdown(self) -> None:
        """Unmaps the buffer."""
        self._buffers.close()

    @staticmethod
    def trainer_send_weights(*args: Any, **kwargs: Any) -> None:
        """Abstract in vLLM 0.24; here the trainer's ranks write to the buffer by themselves."""
        raise NotImplementedError("weights are sent by Policy.export_weights")

    def _check_complete(self, layout: WeightLayout) -> None:
        """vLLM keeps the old weights of whatever does not come, with a log line at most: so it is an error here."""
        if not self._expected:
            return
        expected = dict(self._expected)
        found = group_elements((slot.name, slot.numel) for slot in layout.slots)
        if self._tied:
            expected.pop(_TIED_HEAD, None)
            found.pop(_TIED_HEAD, None)
        wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        if wrong:
            first = "; ".join(
                f"{name}: {found.get(name, 0)} elements, the model has {expected.get(name, 0)}" for name in wrong[:5]
            )
            raise ValueError(f"weight layout does not fit the model in {len(wrong)} tensors: {first}")

    def _check_loaded(self) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        # A layer that is still waiting and has got nothing would silently keep its old weights.
        for name, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            if self._tied and name == "lm_head":
                continue
            if info.can_load() and info.load_numel == 0 and any(True for _ in layer.parameters(recurse=False)):
                raise ValueError(f"vLLM's layer {name} ({type(layer).__name__}) got no weights from the update")


class HostRefitExtension:
    """Mixed into vLLM's worker class; naming it makes vLLM import this module in the worker."""


if "host" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("host", HostWeightTransferEngine)
