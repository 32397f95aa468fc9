"""Recording and replaying which experts each token goes to, on megatron-core's RouterReplay.

With replay a router's chosen experts are the recorded ones; their weights are still its own, from the present logits,
so gradients reach the router as ever (Rollout Routing Replay, arXiv 2510.11370; Vanilla Routing Replay, 2507.18071).
Replayed are discrete choices only, which is why they travel as small integers.

`RouterReplay` has the same interface for this in megatron-core 0.16.1 to 0.19.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from nemo_rl_moe.batch import route_dtype
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.policy.megatron.routing import Routing


class LayerReplay(RouterReplay):
    """One router's replay.

    Megatron's class replays a route for every token and leaves it to its caller to say when a layer is recomputed. Here
    a token may have no route (a pad, and the last token of a sampled response, which the generator never fed back),
    and a recomputed layer finds its micro-batch by itself.

    Args:
        router: the TopKRouter, whose replay this becomes.

    Attributes:
        layer: index of the decoder layer in the whole model, from 0.
        training: a backward pass follows.
        measure_only: the router keeps its own experts, which are only compared.
        counts: [2], (token, layer) pairs in which the router's own set of experts is the recorded one, and all.
    """

    def __init__(self, router: Any, measure_only: bool) -> None:
        super().__init__()
        self.layer_number = router.layer_number
        self.layer = router.layer_number - 1
        self.training = False
        self.measure_only = measure_only
        self.counts: Tensor | None = None
        self._recomputed: list[Tensor] = []
        router.router_replay = self

    def start(self, routing: Routing, training: bool) -> None:
        """A pass begins; what a pass that failed left behind is dropped."""
        self.clear_indices()
        self._recomputed, self.counts = [], None
        self.training = training
        self.router_replay_action = {
            Routing.OWN: None,
            Routing.RECORD: RouterReplayAction.RECORD,
            Routing.REPLAY: RouterReplayAction.REPLAY_FORWARD,
        }[routing]

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores [tokens, topk] and numbers int64 [tokens, topk] of the experts that the tokens go to."""
        if self.router_replay_action is not RouterReplayAction.REPLAY_FORWARD:
            return super().get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)
        assert default_compute_topk is not None
        recorded, again = self._recorded()
        with torch.no_grad():
            own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)[1]
        known = recorded[:, :1] >= 0
        if not again:
            same = (own.sort(dim=1)[0] == recorded.sort(dim=1)[0]).all(dim=1) & known[:, 0]
            found = torch.stack((same.sum(), known.sum()))
            self.counts = found if self.counts is None else self.counts + found
        self.target_topk_idx = own if self.measure_only else torch.where(known, recorded, own)
        return super().get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)

    def _recorded(self) -> tuple[Tensor, bool]:
        """int64 [tokens, topk] of the micro-batch that the router sees, and whether it sees it a second time.

        A layer that is recomputed in backward runs first without and then with gradients; one that is not runs once,
        with. Backward takes micro-batches in the order of forward, on every pipeline stage.
        """
        if self.training and self._recomputed and torch.is_grad_enabled():
            return self._recomputed.pop(0), True
        recorded = self.target_topk_idx
        if recorded is None:
            raise RuntimeError(f"layer {self.layer} is to replay experts, but has none for this micro-batch")
        if self.training and not torch.is_grad_enabled():
            self._recomputed.append(recorded)
        return recorded, False


class ExpertReplay:
    """The routers of this rank's layers.

    Args:
        model: the chunks, built with `moe_enable_routing_replay`.
        measure_only: see LayerReplay.

    Raises:
        UserError: the model has no experts.
    """

    def __init__(self, model: Sequence[Any], measure_only: bool) -> None:
        config = model[0].config
        if not config.num_moe_experts:
            raise UserError("policy.router_replay.enabled: true, but the model has no experts; expected false")
        # Megatron's own instances are all in a list of the class, one for each router; ours take their places.
        RouterReplay.clear_global_router_replay_instances()
        self._layers = [LayerReplay(router, measure_only) for router in _routers(model)]
        self._dtype = torch.from_numpy(np.empty(0, dtype=route_dtype(config.num_moe_experts))).dtype
        self._split = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self._routing = Routing.OWN
        self._records: list[Tensor] = []
        self._topk: int = config.moe_router_topk
        self.num_layers: int = config.num_layers

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers with experts that are on this rank, by index in the whole model."""
        return tuple(layer.layer for layer in self._layers)

    def begin(self, routing: Routing, *, training: bool) -> None:
        """A pass over micro-batches begins."""
        self._routing, self._records = routing, []
        for layer in self._layers:
            layer.start(routing, training)

    def load(self, routes: Tensor | None) -> None:
        """The next forward pass is that of the micro-batch with these routes.

        Args:
            routes: [B, S, L, K], as `Rows.routes`; looked at only when the pass replays.
        """
        if self._routing is not Routing.REPLAY:
            return
        if routes is None:
            raise RuntimeError("a pass is to replay experts, but its batch carries none")
        if routes.shape[2:] != (self.num_layers, self._topk):
            raise RuntimeError(
                f"the batch's routes have {routes.shape[2]} layers and {routes.shape[3]} experts a token, "
                f"the model has {self.num_layers} and {self._topk}"
            )
        rank = mpu.get_tensor_model_parallel_rank() if self._split > 1 else 0
        # Megatron's hidden states are [S, B, H]; sequence parallelism gives each rank a stretch of S.
        own = routes.transpose(0, 1).chunk(self._split)[rank]
        for layer in self._layers:
            layer.target_topk_idx = own[:, :, layer.layer].flatten(0, 1).long()

    def unload(self, shape: Sequence[int]) -> None:
        """The forward pass of a micro-batch of [B, S] slots is done: keeps what it recorded."""
        if self._routing is not Routing.RECORD or not self._layers:
            return
        rows, length = shape
        found = torch.stack([layer.get_recorded_indices() for layer in self._layers], dim=1).to(self._dtype)
        if self._split > 1:
            parts = [torch.empty_like(found) for _ in range(self._split)]
            dist.all_gather(parts, found.contiguous(), group=mpu.get_tensor_model_parallel_group())
            found = torch.cat(parts)
        self._records.append(found.unflatten(0, (length, rows)).transpose(0, 1).cpu())

    def take_records(self) -> list[Tensor]:
        """What the pass recorded: int8 or int16 [B, S, layers of this rank, K] of each micro-batch."""
        records, self._records = self._records, []
        return records

    def agreement(self, device: torch.device) -> float:
        """Share of the last pass's (token, layer) pairs whose recorded experts the router itself would have chosen.

        Collective over all ranks; 1.0 when nothing was recorded.
        """
        total = torch.zeros(2, dtype=torch.float64, device=device)
        for layer in self._layers:
            if layer.counts is not None:
                total += layer.counts
        dist.all_reduce(total)
        same, known = total.tolist()
        return same / known if known else 1.0


def _routers(model: Sequence[Any]) -> Iterator[Any]:
    """Routers of the decoder in the order of its layers; layers that only predict further tokens keep their own."""
    from megatron.core.transformer.moe.router import TopKRouter

    for chunk in model:
        for module in chunk.decoder.modules():
            if isinstance(module, TopKRouter):
                yield module
