"""What a checkpoint holds, read from file headers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nemo_rl_moe.refit.checkpoint_shapes import checkpoint_elements


def test_two_shards_of_3_tensors_give_their_elements_with_experts_summed(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(6)}, tmp_path / "model-1.safetensors", metadata={"format": "pt"})
    experts = {f"model.layers.0.mlp.experts.{e}.up_proj.weight": torch.zeros(2, 5) for e in range(3)}
    save_file(experts, tmp_path / "model-2.safetensors")
    assert checkpoint_elements(str(tmp_path)) == {"model.norm.weight": 6, "model.layers.0.mlp.experts": 30}


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, (4).to_bytes(8, "little") + b"nope"])
def test_a_file_of_another_format_is_an_error_with_its_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors: not a safetensors file"):
        checkpoint_elements(str(tmp_path))


def test_a_folder_without_safetensors_expects_nothing(tmp_path: Path) -> None:
    assert checkpoint_elements(str(tmp_path)) == {}
