"""Which sequences of a batch begin with the same prompt, so that the trainer computes it once for all of them.

The responses of a GRPO group differ only after their prompt. Under causal attention the prompt's hidden states are the
same in each, so a packed row can hold the prompt once and let every response attend to it: the log-probabilities are
those of the sequences alone, and the gradients of all responses add up in the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rl_moe.batch import IntArray, SequenceBatch


@dataclass(frozen=True)
class Family:
    """Sequences that start with the same tokens.

    Attributes:
        samples: indices into the batch, longest first.
        prompt: tokens that they share; 0 shares nothing.
    """

    samples: tuple[int, ...]
    prompt: int

    def num_tokens(self, lengths: IntArray) -> int:
        """Tokens to compute: the prompt once, and each response."""
        return self.prompt + sum(int(lengths[i]) - self.prompt for i in self.samples)


def find_families(batch: SequenceBatch) -> list[Family]:
    """Groups the batch's sequences by their prompt, which is what comes before the first sampled token.

    A sequence without a sampled token, or whose first token was sampled, is a family by itself.
    """
    members: dict[bytes, list[int]] = {}
    prompts: dict[bytes, int] = {}
    offsets = batch.offsets
    for i, (start, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        # argmax stops at the first sampled token, and says 0 where there is none.
        length = int(batch.token_mask[start:end].argmax())
        key = batch.tokens[start : start + length].tobytes() if length else f"alone {i}".encode()
        members.setdefault(key, []).append(i)
        prompts[key] = length
    return [
        Family(tuple(sorted(samples, key=lambda i: (-batch.lengths[i], i))), prompts[key])
        for key, samples in members.items()
    ]


def split_families(families: list[Family], lengths: IntArray, budget: int, at_least: int) -> list[Family]:
    """Halves families until each fits the budget and there are enough of them, as far as samples allow.

    Args:
        budget: tokens at most of a family; one of a single sequence may be larger.
        at_least: families wanted, one for each data-parallel rank.
    """
    done: list[Family] = []
    rest = list(families)
    while rest:
        family = rest.pop()
        if family.num_tokens(lengths) > budget and len(family.samples) > 1:
            rest.extend(_halves(family))
        else:
            done.append(family)
    while len(done) < at_least:
        largest = max(done, key=lambda f: (len(f.samples) > 1, f.num_tokens(lengths)))
        if len(largest.samples) == 1:
            break
        done.remove(largest)
        done.extend(_halves(largest))
    return done


def _halves(family: Family) -> tuple[Family, Family]:
    """Every second sample, so that both halves have long and short ones."""
    return Family(family.samples[::2], family.prompt), Family(family.samples[1::2], family.prompt)
