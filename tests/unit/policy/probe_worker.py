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

    def watch_routing(self) -> None:
        """From now on every MoE layer's padding mask and routes are recorded."""
        from megatron.core.transformer.moe.router import TopKRouter

        self._routing: list[dict] = []

        def record(_, args, output) -> None:
            mask = args[1]
            routes = output[1]
            self._routing.append(
                {
                    "slots": len(routes),
                    "pads": None if mask is None else mask.flatten().numpy().copy(),
                    "routes": routes.sum(1).numpy(),
                }
            )

        for module in self._trainer.model[0].modules():
            if isinstance(module, TopKRouter):
                module.register_forward_hook(record)

    def routing(self) -> list[dict]:
        """What was recorded since the last call: `slots`, `pads` bool [slots] or None, `routes` int [slots]."""
        found, self._routing = self._routing, []
        return found

    def perturb_routers(self, scale: float) -> None:
        """Adds noise of the given size to every router's weights, the same on all ranks."""
        generator = torch.Generator().manual_seed(0)
        for name, parameter in self._trainer.model[0].named_parameters():
            if ".router." in name:
                parameter.data += scale * torch.randn(parameter.shape, generator=generator)

    def watch_experts(self) -> None:
        """From now on the map of tokens to experts of every router is recorded, recomputed passes included."""
        from megatron.core.transformer.moe.router import TopKRouter

        self._maps: list[tuple[int, np.ndarray]] = []

        def record(router, _, output) -> None:
            self._maps.append((router.layer_number - 1, output[1].numpy().copy()))

        for module in self._trainer.model[0].modules():
            if isinstance(module, TopKRouter):
                module.register_forward_hook(record)

    def expert_maps(self) -> list[tuple[int, np.ndarray]]:
        """What was recorded since the last call: layer, and bool [tokens, experts]."""
        found, self._maps = self._maps, []
        return found

    def random_state(self) -> bytes:
        """State of torch's generator."""
        return torch.get_rng_state().numpy().tobytes()
