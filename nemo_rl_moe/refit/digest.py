"""A cheap fingerprint of weights in a shared buffer: do both sides look at the same bytes?"""

from __future__ import annotations

import hashlib

import torch

from nemo_rl_moe.refit.layout import WeightLayout

_TENSORS = 64
_BYTES_PER_TENSOR = 4096


def weight_digest(layout: WeightLayout, buffer: torch.Tensor) -> str:
    """32 hex digits over a sample: at most 64 tensors spread evenly over the model, 4 KiB from the middle of each.

    It reads at most 256 KiB, so it costs under a millisecond at any size. It finds a buffer that is
    foreign, empty or of another version, not a single flipped bit or one tensor that was left out.

    Args:
        layout: of the buffer.
        buffer: uint8 [layout.nbytes].
    """
    digest = hashlib.blake2b(layout.fingerprint.encode(), digest_size=16)
    count = len(layout.slots)
    chosen = sorted({round(i * (count - 1) / (_TENSORS - 1)) for i in range(_TENSORS)}) if count else []
    for index in chosen:
        slot = layout.slots[index]
        size = min(slot.nbytes, _BYTES_PER_TENSOR)
        start = slot.offset + (slot.nbytes - size) // 2
        digest.update(buffer[start : start + size].numpy().tobytes())
    return digest.hexdigest()
