"""Memory of each kind of GPU: one table."""

from __future__ import annotations

from nemo_rl_moe.recipe.schema import Recipe

MIB, GIB = 2**20, 2**30

# What nvidia-smi reports as the total of the part, in MiB, in public logs; a CUDA process sees about 1 % less. The
# names on data sheets (80, 141, 180, 186, 279, 96 GB) are not exact in any unit. GH200 also exists with 144 GB: set
# cluster.gpu_memory_gib for it.
TOTAL_MIB = {
    "h100": 81559,
    "h200": 143771,
    "b200": 183359,
    "gb200": 189471,
    "gb300": 284208,
    "gh200": 97871,
}
USABLE = 0.99


def gpu_bytes(recipe: Recipe) -> int | None:
    """Bytes of one GPU that a process can use; None on a CPU and where the GPU is not named."""
    cluster = recipe.cluster
    if cluster.device == "cpu":
        return None
    if cluster.gpu_memory_gib is not None:
        return int(cluster.gpu_memory_gib * GIB)
    return int(TOTAL_MIB[cluster.gpu_type] * MIB * USABLE) if cluster.gpu_type else None
