"""The values nearest to a wrong one that would divide."""

from __future__ import annotations


def near_divisors(whole: int, value: int) -> str:
    """The divisors of `whole` next to `value`, below and above it, as text such as `4 or 8`."""
    divisors = [n for n in range(1, whole + 1) if whole % n == 0]
    below = [n for n in divisors if n < value][-1:]
    above = [n for n in divisors if n > value][:1]
    return " or ".join(str(n) for n in (*below, *above))
