"""HybridEP before the process group exists: its environment, and whether it can run at all."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.hybrid_ep import topology, topology_line, uses_hybrid_ep
from nemo_rl_moe.recipe.schema import Recipe


def prepare(recipe: Recipe, rank: int) -> None:
    """Sets the variables that HybridEP reads and prints the topology on rank 0. Nothing without HybridEP.

    HybridEP reads them when its buffer is made, inside the first forward pass, where a missing one costs a hang.

    Raises:
        UserError: HybridEP or the compiler that it needs at run time is not there.
    """
    if not uses_hybrid_ep(recipe):
        return
    values = topology(recipe, os.environ)
    os.environ.update({value.name: value.value for value in values})
    # Its default is the home folder, which many nodes may share and would all write to at once.
    os.environ.setdefault("HYBRID_EP_CACHE_DIR", tempfile.gettempdir())
    if rank == 0:
        print(topology_line(recipe, values), flush=True)
    _check_installed()


def hybrid_ep_folder() -> Path | None:
    """Folder of the installed DeepEP, if it has HybridEP; nothing is imported."""
    spec = importlib.util.find_spec("deep_ep")
    if spec is None or spec.origin is None:
        return None
    # Both branches of DeepEP are called deep_ep; only hybrid-ep ships this file.
    folder = Path(spec.origin).parent
    return folder if (folder / "hybrid_ep_buffer.py").is_file() else None


def _check_installed() -> None:
    backend = "policy.megatron_cfg.moe_flex_dispatcher_backend: hybridep"
    if hybrid_ep_folder() is None:
        raise UserError(
            f"{backend}, but there is no deep_ep with HybridEP; build the branch hybrid-ep of DeepEP "
            "(docker/install_gpu_stack.sh)"
        )
    home = os.environ.get("CUDA_HOME")
    if home is None or not Path(home, "bin", "nvcc").exists():
        where = "CUDA_HOME is not set" if home is None else f"{home}/bin/nvcc does not exist"
        raise UserError(
            f"{backend} compiles its kernels at run time, but {where}; set policy.megatron_cfg.env_vars.CUDA_HOME to "
            "the folder of the CUDA toolkit"
        )
