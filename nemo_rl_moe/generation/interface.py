"""What the loops ask of a generator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class SamplingSpec:
    """How to sample. Token ids that end a response come from the generator's recipe and tokenizer.

    Attributes:
        temperature: 0 is greedy.
        max_new_tokens: response tokens at most.
        n: responses for each prompt.
        seed: base seed; response j of prompt i is drawn with a seed made of (seed, prompt id, j), so that the same
            prompt gets the same draws whatever it is batched with.
    """

    temperature: float
    max_new_tokens: int
    n: int
    seed: int


@dataclass
class Completions:
    """M sampled responses, ragged, in prompt order with the n responses of a prompt next to each other.

    Attributes:
        lengths: int64 [M], response tokens of each (the end token included when it was sampled).
        token_ids: int32 [sum(lengths)], sampled ids exactly as drawn; never re-tokenized.
        logprobs: float32 [sum(lengths)], of the sampled ids at the sampling temperature (at 1 when greedy).
        truncated: bool [M], True where the response was cut at the length limit.
        token_versions: int32 [sum(lengths)], version of the weights that sampled each token; it never falls within a
            response, and rises where an update came while it ran.
        texts: the M decoded responses, without special tokens. The workers decode, side by side: the controller would
            need longer for it than for all else that it does with a token.
    """

    lengths: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    truncated: NDArray[np.bool_]
    token_versions: NDArray[np.int32]
    texts: list[str]

    @property
    def weight_versions(self) -> NDArray[np.int64]:
        """int64 [M], version that sampled each response's first token."""
        return self.token_versions[np.cumsum(self.lengths) - self.lengths].astype(np.int64)

    def split(self, n: int) -> list[Completions]:
        """The responses of each prompt apart, n to a prompt."""
        lengths = self.lengths.reshape(-1, n)
        ends = np.cumsum(lengths.sum(axis=1))[:-1]
        flat = [np.split(values, ends) for values in (self.token_ids, self.logprobs, self.token_versions)]
        texts = [self.texts[start : start + n] for start in range(0, len(self.texts), n)]
        groups = zip(lengths, *flat, self.truncated.reshape(-1, n), texts, strict=True)
        return [Completions(own, ids, lp, cut, versions, said) for own, ids, lp, versions, cut, said in groups]

    @staticmethod
    def concat(parts: Sequence[Completions]) -> Completions:
        """All responses of the parts, in order."""
        flat = ("lengths", "token_ids", "logprobs", "truncated", "token_versions")
        joined: dict[str, Any] = {name: np.concatenate([getattr(p, name) for p in parts]) for name in flat}
        return Completions(**joined | {"texts": [text for p in parts for text in p.texts]})
