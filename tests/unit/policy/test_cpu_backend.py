"""The risk: a patch that changes what is computed, or that reaches code other than Megatron's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_moe.recipe.schema.policy import MegatronConfig
from tests.unit.policy.megatron_runs import Join
from tests.unit.policy.ranks import Ranks


def test_cuda_means_the_cpu_and_only_megatrons_optimizers_see_cuda_types(one_rank: Ranks) -> None:
    (found,) = one_rank.call(_devices_and_types)
    assert found["device"] == "cpu"
    assert found["moved"]
    assert found["type_here"] == "torch.FloatTensor"
    assert found["type_in_optimizer"] == "torch.cuda.FloatTensor"
    assert found["installed_twice_is_the_same"]


def _devices_and_types(join: Join) -> dict[str, Any]:
    from nemo_rl_moe.policy.megatron import cpu_backend

    before = (torch.zeros, torch.Tensor.type, torch.cuda.current_stream, dist.all_gather)
    cpu_backend.install()
    tensor = torch.zeros(3, device="cuda", pin_memory=True)
    scope: dict[str, Any] = {"__name__": "megatron.core.optimizer.distrib_optimizer", "tensor": tensor}
    exec("seen = tensor.type()", scope)
    return {
        "device": tensor.device.type,
        "moved": tensor.cuda() is tensor,
        "type_here": tensor.type(),
        "type_in_optimizer": scope["seen"],
        "installed_twice_is_the_same": before
        == (torch.zeros, torch.Tensor.type, torch.cuda.current_stream, dist.all_gather),
    }


def test_four_ranks_gather_and_reduce_parts_of_1_to_4_rows(four_ranks: Ranks) -> None:
    for found in four_ranks.call(_gather_and_reduce_unequal_parts):
        # Rank r gives r + 1 rows of r.
        assert found["gathered"] == [[0.0], [1.0] * 2, [2.0] * 3, [3.0] * 4]
        # Rank r keeps r + 1 rows; the four ranks add 1, 2, 3 and 4.
        assert found["reduced"] == [10.0] * (found["rank"] + 1)
        assert found["equal_parts"] == [0.0, 1.0, 2.0, 3.0]


def _gather_and_reduce_unequal_parts(join: Join) -> dict[str, Any]:
    rank = join(MegatronConfig()).rank
    gathered = [torch.empty(r + 1) for r in range(4)]
    dist.all_gather(gathered, torch.full((rank + 1,), float(rank)))
    reduced = torch.empty(rank + 1)
    dist.reduce_scatter(reduced, [torch.full((r + 1,), float(rank + 1)) for r in range(4)])
    equal = [torch.empty(1) for _ in range(4)]
    dist.all_gather(equal, torch.tensor([float(rank)]))
    return {
        "rank": rank,
        "gathered": [t.tolist() for t in gathered],
        "reduced": reduced.tolist(),
        "equal_parts": torch.cat(equal).tolist(),
    }


def test_ranks_of_one_tensor_parallel_group_draw_different_numbers_and_repeat_them(four_ranks: Ranks) -> None:
    first = four_ranks.call(_draw)
    assert first == four_ranks.call(_draw)
    same, own = [r[0] for r in first], [r[1] for r in first]
    # Ranks 0-1 and 2-3 share a tensor-parallel group each.
    assert same == [same[0]] * 4
    assert own[0] != own[1]
    assert own[:2] == own[2:]


def _draw(join: Join) -> tuple[float, float]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    join(MegatronConfig(tensor_model_parallel_size=2))
    with get_cuda_rng_tracker().fork():
        own = torch.rand(()).item()
    return torch.rand(()).item(), own
