"""Response lengths: random draws that every simulated placement shares."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from nemo_rl_moe.bench.placement.workload import Constant, Empirical, Lognormal
from nemo_rl_moe.errors import UserError

Lengths = Constant | Lognormal | Empirical
_BISECTIONS = 60


def groups(lengths: Lengths, group_size: int, limit: float, seed: int) -> Iterator[NDArray[np.float64]]:
    """Endless response lengths, float64 [group_size] in tokens for each prompt, independent of one another.

    Args:
        lengths: the distribution.
        limit: tokens at which a response is cut.

    Raises:
        UserError: the mean of a log-normal distribution cannot be reached below the limit.
    """
    draw, rng = _sampler(lengths, limit), np.random.default_rng(seed)
    while True:
        yield np.minimum(draw(rng, group_size), limit)


def _sampler(lengths: Lengths, limit: float) -> Callable[[np.random.Generator, int], NDArray[np.float64]]:
    if isinstance(lengths, Constant):
        tokens = lengths.tokens
        return lambda rng, size: np.full(size, tokens)
    if isinstance(lengths, Empirical):
        observed = np.asarray(lengths.tokens, dtype=np.float64)
        return lambda rng, size: rng.choice(observed, size)
    if lengths.mean >= limit:
        raise UserError(f"response_tokens.mean: {lengths.mean:g}, expected less than the recipe's limit of {limit:g}")
    mu, sigma = _mu(lengths.mean, lengths.sigma, limit), lengths.sigma
    return lambda rng, size: rng.lognormal(mu, sigma, size)


def cut_mean(mu: float, sigma: float, limit: float) -> float:
    """Mean of min(X, limit) with log X normal(mu, sigma).

    It is exp(mu + sigma^2 / 2) F(z - sigma) + limit (1 - F(z)), with z = (log limit - mu) / sigma and F the normal
    distribution: the partial expectation of the log-normal, and the mass that is cut.
    """
    z = (math.log(limit) - mu) / sigma
    return math.exp(mu + sigma**2 / 2) * _normal(z - sigma) + limit * (1 - _normal(z))


def _mu(mean: float, sigma: float, limit: float) -> float:
    """The log-median whose cut distribution has the mean: bisection, as the cut mean rises with it."""
    low, high = math.log(mean) - sigma**2 / 2, math.log(limit) + 10 * sigma
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if cut_mean(middle, sigma, limit) < mean else (low, middle)
    return low


def _normal(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))
