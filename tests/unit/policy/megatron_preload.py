"""Imported once in the server that rank processes are forked from: importing Megatron takes longer than most tests."""

import os

os.environ.update(OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1", CUDA_VISIBLE_DEVICES="")

import torch

# A thread pool does not survive a fork, so none may be started here.
torch.set_num_threads(1)

from nemo_rl_moe.policy.megatron import cpu_backend  # noqa: E402

cpu_backend.install()

import megatron.core.models.gpt  # noqa: E402,F401

from nemo_rl_moe.policy.megatron import (  # noqa: E402,F401
    checkpoint,
    local_modules,
    logprobs,
    model,
    optimizer,
    parallel,
    reference,
    train_step,
    weights,
)
from tests.unit.policy import probe_worker, tiny_models  # noqa: E402,F401
