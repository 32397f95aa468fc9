"""A cheap fingerprint of weights, tensor by tensor: do both sides hold the same bytes, and if not, where?"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

SAMPLED_TENSORS = 64
_BYTES_PER_TENSOR = 4096
_NAMED = 5


def weight_digest(tensors: Mapping[str, torch.Tensor], version: int) -> dict[str, str]:
    """16 hex digits for each tensor of a sample: at most 64, spread evenly, of each 4 KiB from its middle.

    It reads at most 256 KiB, so it costs about a millisecond at any size. Each version samples the neighbours of the
    tensors before: N / 64 updates look at every tensor once. What it finds is a buffer that is foreign, empty or
    of another version, and a tensor that went wrong as a whole; a single flipped bit it finds by chance.

    Args:
        tensors: name -> contiguous tensor, in the order of the layout.
        version: of the weights.
    """
    return {name: tensor_digest(tensors[name]) for name in sample_names(list(tensors), version)}


def sample_names(names: Sequence[str], version: int) -> list[str]:
    """The names that `weight_digest` looks at for a version."""
    count = len(names)
    if count <= SAMPLED_TENSORS:
        return list(names)
    shift = version % -(-count // SAMPLED_TENSORS)
    return [names[(i * count // SAMPLED_TENSORS + shift) % count] for i in range(SAMPLED_TENSORS)]


def tensor_digest(tensor: torch.Tensor) -> str:
    """16 hex digits of the 4 KiB in the middle of a contiguous tensor, or of all of a smaller one."""
    data = tensor.view(-1).view(torch.uint8)
    size = min(len(data), _BYTES_PER_TENSOR)
    start = (len(data) - size) // 2
    return hashlib.blake2b(data[start : start + size].cpu().numpy().tobytes(), digest_size=8).hexdigest()


def check_digest(tensors: Mapping[str, torch.Tensor], sent: Mapping[str, str]) -> None:
    """Compares what arrived with the sender's digest.

    Args:
        tensors: name -> contiguous tensor, as it arrived.
        sent: `weight_digest` of the sender.

    Raises:
        ValueError: naming the tensors that differ.
    """
    wrong = [name for name, digest in sent.items() if name not in tensors or tensor_digest(tensors[name]) != digest]
    if wrong:
        rest = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise ValueError(
            f"{len(wrong)} of {len(sent)} sampled tensors are not what was sent: {', '.join(wrong[:_NAMED])}{rest}"
        )
