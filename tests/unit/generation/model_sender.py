"""The sending side of a refit without a trainer: the weights of a transformers model."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from nemo_rl_moe.refit.layout import WeightLayout
from nemo_rl_moe.refit.shared_memory import SharedBuffer
from tests.unit.generation.tiny_qwen import checkpoint_tensors


@dataclass
class ModelSender:
    """Sends the weights of a transformers model."""

    model: PreTrainedModel

    def weight_layout(self) -> WeightLayout:
        """Of the checkpoint's tensors."""
        return WeightLayout.build((k, v.dtype, v.shape) for k, v in checkpoint_tensors(self.model).items())

    def export_weights(self, buffer_path: str) -> int:
        """Writes them."""
        layout = self.weight_layout()
        with SharedBuffer.attach(buffer_path, layout.nbytes) as buffer:
            for name, view in layout.views(buffer.tensor).items():
                view.copy_(checkpoint_tensors(self.model)[name])
        return layout.numel
