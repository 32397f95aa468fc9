"""A PolicyWorker that also shows its insides, for tests."""

from __future__ import annotations

import numpy as np
import torch

from nemo_rl_moe.policy.worker import PolicyWorker


class ProbeWorker(PolicyWorker):
    """PolicyWorker with methods that read or spoil its parameters."""

    def parameters(self) -> dict[str, np.ndarray]:
        """A copy of every local parameter, and of the optimizer's own copies (`main.<group>.<index>`)."""
        named = dict(self._trainer.model[0].named_parameters())
        for i, group in enumerate(self._trainer.optimizer.param_groups):
            named |= {f"main.{i}.{j}": parameter for j, parameter in enumerate(group["params"])}
        return {name: p.detach().float().numpy().copy() for name, p in named.items()}

    def spoil_parameter(self, value: float) -> None:
        """Writes the value into the first element of the first parameter."""
        next(self._trainer.model[0].parameters()).data.view(-1)[0] = value

    def random_state(self) -> bytes:
        """State of torch's generator."""
        return torch.get_rng_state().numpy().tobytes()
