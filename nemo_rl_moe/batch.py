"""The one form in which sequences travel: ragged, never padded.

Between processes a batch is a few flat numpy arrays and the length of each sequence. There is no padding, so nothing
can mistake a real token for a pad: what is real is known from lengths alone. Padding exists only inside the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]

# Name of the token value that holds which experts each token went to.
ROUTED_EXPERTS = "routed_experts"


@dataclass
class SequenceBatch:
    """N sequences of prompt and response tokens, T tokens in all, with what is known of each token and sample.

    Per-token arrays have shape [T, ...] and follow the sequences one after the other. A log-probability at position t
    is that of token t given the tokens before it in its sequence, at the sampling temperature; 0 where none is known.

    Attributes:
        lengths: int64 [N], tokens of each sequence.
        tokens: int32 [T], token ids.
        token_mask: bool [T], True where the token was sampled by the policy and counts in the loss.
        token_values: [T] each: `generation_logprobs`, `prev_logprobs`, `reference_logprobs`, `advantages` (float32),
            `token_versions` (int32, version of the weights that sampled it; 0 where none did). With router replay also
            `routed_experts` [T, L, K]: the K experts of each token in each of the model's L layers, of type
            `route_dtype`, -1 where none are known: in layers without experts, and for a token that no pass has seen.
        sample_values: [N] each: `sample_mask` (float32, 0 leaves the sample out of the loss), `rewards` (float32),
            `prompt_ids` (int64, which prompt), `truncated` (bool, cut at the length limit),
            `weight_versions` (int64, version of the weights that sampled its first token).
    """

    lengths: IntArray
    tokens: NDArray[np.int32]
    token_mask: NDArray[np.bool_]
    token_values: dict[str, NDArray] = field(default_factory=dict)
    sample_values: dict[str, NDArray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        total = int(self.lengths.sum())
        for name, values in {"tokens": self.tokens, "token_mask": self.token_mask, **self.token_values}.items():
            expected = (total, *values.shape[1:]) if name == ROUTED_EXPERTS and values.ndim == 3 else (total,)
            if values.shape != expected:
                raise ValueError(f"{name} has shape {values.shape}, expected {expected}")
        for name, values in self.sample_values.items():
            if values.shape != self.lengths.shape:
                raise ValueError(f"{name} has shape {values.shape}, expected {self.lengths.shape}")

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def offsets(self) -> IntArray:
        """int64 [N + 1]: sequence i holds the tokens offsets[i]:offsets[i + 1]."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)

    @property
    def sequence_ids(self) -> IntArray:
        """int64 [T]: which sequence each token belongs to."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def token_spans(self, samples: Sequence[int] | IntArray) -> list[tuple[int, int]]:
        """Stretches [start, end) of the per-token arrays that hold the given samples, in the given order.

        Samples that follow one another in the batch are one stretch.
        """
        rows = np.asarray(samples, dtype=np.int64)
        if len(rows) == 0:
            return []
        breaks = np.flatnonzero(np.diff(rows) != 1)
        first, last = rows[np.append(0, breaks + 1)], rows[np.append(breaks, len(rows) - 1)]
        offsets = self.offsets
        return list(zip(offsets[first].tolist(), offsets[last + 1].tolist(), strict=True))

    def token_index(self, samples: Sequence[int] | IntArray) -> IntArray:
        """Positions in the per-token arrays of the given samples' tokens, in the given order."""
        spans = self.token_spans(samples)
        return np.concatenate([np.zeros(0, dtype=np.int64), *(np.arange(start, end) for start, end in spans)])

    def select(self, samples: Sequence[int] | IntArray) -> SequenceBatch:
        """The given samples, in the given order (repeats allowed).

        Samples that follow one another are views of this batch's per-token arrays, not copies.
        """
        rows = np.asarray(samples, dtype=np.int64)
        spans = self.token_spans(rows)

        def picked(values: NDArray) -> NDArray:
            # Whole stretches: an index of every token would be larger than what it picks, and several times slower.
            parts = [values[start:end] for start, end in spans]
            return parts[0] if len(parts) == 1 else np.concatenate([values[:0], *parts])

        return SequenceBatch(
            self.lengths[rows],
            picked(self.tokens),
            picked(self.token_mask),
            {name: picked(values) for name, values in self.token_values.items()},
            {name: values[rows] for name, values in self.sample_values.items()},
        )

    def with_values(
        self, tokens: dict[str, NDArray] | None = None, samples: dict[str, NDArray] | None = None
    ) -> SequenceBatch:
        """The same sequences with further per-token and per-sample values."""
        return SequenceBatch(
            self.lengths,
            self.tokens,
            self.token_mask,
            {**self.token_values, **(tokens or {})},
            {**self.sample_values, **(samples or {})},
        )

    @staticmethod
    def concat(batches: Sequence[SequenceBatch]) -> SequenceBatch:
        """All sequences of the batches, which must carry the same values."""
        if not batches:
            raise ValueError("no batches to concatenate")
        keys = {(frozenset(b.token_values), frozenset(b.sample_values)) for b in batches}
        if len(keys) > 1:
            raise ValueError(f"batches carry different values: {sorted(map(str, keys))}")
        arrays = {f.name: np.concatenate([getattr(b, f.name) for b in batches]) for f in fields(SequenceBatch)[:3]}
        first = batches[0]
        return SequenceBatch(
            **arrays,
            token_values={k: np.concatenate([b.token_values[k] for b in batches]) for k in first.token_values},
            sample_values={k: np.concatenate([b.sample_values[k] for b in batches]) for k in first.sample_values},
        )


def route_dtype(num_experts: int) -> np.dtype:
    """The smallest integer type that holds every expert's number and -1: routes are the largest part of a batch."""
    return np.dtype(np.int8 if num_experts <= 128 else np.int16)
