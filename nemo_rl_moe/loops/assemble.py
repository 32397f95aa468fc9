"""Prompts and sampled responses -> one ragged batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nemo_rl_moe.batch import SequenceBatch
from nemo_rl_moe.data.prompt import Prompt
from nemo_rl_moe.generation.interface import Completions


def assemble(prompts: Sequence[Prompt], completions: Completions, n: int) -> SequenceBatch:
    """Joins each prompt with its n responses, ragged, without a loop over tokens.

    `prompt_ids` is the position of the prompt in this batch, not the row of the dataset: the same row drawn twice is
    two groups, each with its own baseline.
    """
    rows = [np.asarray(p.token_ids, dtype=np.int32) for p in prompts]
    prompt_lengths = np.repeat(np.array([len(row) for row in rows], dtype=np.int64), n)
    lengths = prompt_lengths + completions.lengths
    stretches = np.stack([prompt_lengths, completions.lengths], axis=1)
    sampled = np.repeat(np.tile([False, True], len(lengths)), stretches.ravel())
    tokens = np.empty(len(sampled), dtype=np.int32)
    tokens[sampled] = completions.token_ids
    tokens[~sampled] = np.concatenate([row for row in rows for _ in range(n)])
    logprobs = np.zeros(len(sampled), dtype=np.float32)
    logprobs[sampled] = completions.logprobs
    versions = np.zeros(len(sampled), dtype=np.int32)
    versions[sampled] = completions.token_versions
    return SequenceBatch(
        lengths=lengths,
        tokens=tokens,
        token_mask=sampled,
        token_values={"generation_logprobs": logprobs, "token_versions": versions},
        sample_values={
            "prompt_ids": np.repeat(np.arange(len(prompts), dtype=np.int64), n),
            "truncated": completions.truncated,
            "weight_versions": completions.weight_versions,
            "sample_mask": np.ones(len(lengths), dtype=np.float32),
        },
    )
