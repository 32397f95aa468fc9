"""The token dispatcher, HybridEP and the NVLink topology."""

# ruff: noqa: E501 - one mutation a line reads best as a table.

from __future__ import annotations

from tests.unit.recipes.mutations.base import ASYNC, BIG, DENSE, ENV, H100, M, MEGATRON, RANKS, SYNC, TINY

DISPATCH = [
    M("dispatcher", SYNC, {f"{MEGATRON}.moe_flex_dispatcher_backend": None}, "the flex dispatcher needs a backend"),
    M("dispatcher", TINY, {f"{MEGATRON}.moe_flex_dispatcher_backend": "deepep", "cluster.device": "cuda"}, "deepep has no effect with dispatcher alltoall, expected flex"),
    M("dispatcher", SYNC, {f"{MEGATRON}.moe_enable_deepep": True}, "expected false"),
    M("dispatcher", SYNC, {f"{MEGATRON}.moe_shared_expert_overlap": True}, "only the alltoall dispatcher overlaps"),
    M("dispatcher", DENSE, {f"{MEGATRON}.moe_token_dispatcher_type": "flex", f"{MEGATRON}.moe_flex_dispatcher_backend": "deepep"}, "flex on a dense model"),
    M("HybridEP keys", SYNC, {f"{MEGATRON}.moe_hybridep_num_sms": None}, "expected a number, such as 32"),
    M("HybridEP keys", DENSE, {f"{MEGATRON}.moe_hybridep_num_sms": 32}, "has no effect without policy.megatron_cfg.moe_flex_dispatcher_backend hybridep"),
    M("HybridEP keys", DENSE, {f"{ENV}.USE_MNNVL": "1"}, "has no effect without"),
    M("HybridEP environment", SYNC, {f"{ENV}.USE_MNNVL": "yes"}, '\'yes\', expected "0" or "1"'),
    M("HybridEP environment", SYNC, {f"{ENV}.{RANKS}": "-16"}, "'-16', expected a positive integer as text, expected \"16\""),
    M("HybridEP environment", SYNC, {f"{ENV}.NUM_OF_TOKENS_PER_CHUNK_COMBINE_API": "x"}, "'x', expected a positive integer"),
    M("HybridEP typed keys", SYNC, {f"{MEGATRON}.hybridep_num_ranks_per_nvlink_domain": 16, f"{ENV}.{RANKS}": "8"}, f"16, but {RANKS} is 8"),
    M("HybridEP typed keys", SYNC, {f"{MEGATRON}.hybridep_use_mnnvl": False}, "false, but USE_MNNVL is 1"),
    M("HybridEP topology", SYNC, {f"{ENV}.{RANKS}": "8"}, "8 ranks in an NVLink domain, expected EP 16"),
    M("HybridEP topology", SYNC, {f"{ENV}.{RANKS}": "3"}, "3 ranks in an NVLink domain do not divide EP 16"),
    M("HybridEP topology", BIG, {f"{ENV}.{RANKS}": "16"}, "16 ranks in an NVLink domain of 8 GPUs (h100)"),
    M("HybridEP topology", SYNC, {f"{ENV}.NVLINK_DOMAIN_SIZE": "8"}, "8, expected 72 on gb200"),
    M("HybridEP topology", H100, {f"{ENV}.USE_MNNVL": "1"}, '"1", expected "0": the NVLink domain of h100 ends at the node'),
    M("HybridEP prepadding", SYNC, {f"{MEGATRON}.moe_hybridep_prepad_packed_inputs": False}, "false, expected true with packed inputs, PP 1, 0 MTP layers"),
    M("HybridEP prepadding", BIG, {f"{MEGATRON}.moe_hybridep_prepad_packed_inputs": True}, "true, expected false with packed inputs, PP 8"),
    M("HybridEP prepadding", SYNC, {f"{MEGATRON}.mtp_num_layers": 1}, "expected false with packed inputs, PP 1, 1 MTP layers"),
    M("HybridEP shape", SYNC, {f"{ENV}.NUM_OF_TOKENS_PER_CHUNK_COMBINE_API": "100"}, "100 tokens, expected a multiple of 32"),
    M("GPU type", SYNC, {"cluster.gpu_type": "gh200", f"{ENV}.NVLINK_DOMAIN_SIZE": "4", f"{ENV}.USE_MNNVL": "0", f"{ENV}.{RANKS}": "4", "cluster.gpus_per_node": 8, "cluster.num_nodes": 2, "cluster.segment_size": None}, "8 GPUs on a node; gh200 has 4", "cluster.gpus_per_node"),
    M("GPU type", TINY, {"cluster.gpu_type": "h100"}, "h100 with device cpu, expected null"),
    M("segments", SYNC, {"cluster.segment_size": None}, "expected 4 nodes (EP 16 / 4 GPUs), or a multiple"),
    M("segments", SYNC, {"cluster.segment_size": 2}, "2 nodes x 4 GPUs are not a multiple of EP 16"),
    M("GPU type", TINY, {"cluster.gpu_memory_gib": 80.0}, "has no effect with device cpu"),
    M("segments", ASYNC, {"cluster.segment_size": 4}, "2 training nodes are not a multiple of segments of 4"),
    M("segments", SYNC, {"cluster.segment_size": 20}, "20 nodes x 4 GPUs are more than the 72 of an NVLink domain"),
]  # fmt: skip
