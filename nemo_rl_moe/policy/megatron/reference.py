"""The frozen reference: the weights that the policy started with, put in its place for a forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class ReferenceWeights:
    """A copy of this rank's parameters, in host memory.

    Args:
        model: the model chunks as they are now.
    """

    def __init__(self, model: Sequence[Any]) -> None:
        self._weights: list[Tensor] = []
        for parameter in _parameters(model):
            host = torch.empty_like(parameter, device="cpu", pin_memory=parameter.is_cuda)
            self._weights.append(host.copy_(parameter.detach()))

    @contextlib.contextmanager
    def in_place_of(self, model: Sequence[Any]) -> Iterator[None]:
        """The model computes with the reference weights inside the context.

        Parameters are pointed at other memory instead of being overwritten: the policy's own weights, which the
        optimizer's and DDP's buffers share, are never touched, so they are the same bits afterwards whatever happens.
        """
        own = []
        try:
            for parameter, weight in zip(_parameters(model), self._weights, strict=True):
                own.append((parameter, parameter.data))
                parameter.data = weight.to(parameter.device, non_blocking=True)
            yield
        finally:
            for parameter, data in own:
                parameter.data = data


def _parameters(model: Sequence[Any]) -> list[torch.nn.Parameter]:
    return [parameter for chunk in model for parameter in chunk.parameters()]
