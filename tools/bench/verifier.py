"""The reward of both sides: 1 for texts of an even number of characters. Cheap, and not equal within a group."""

from __future__ import annotations

from typing import Any


def text_parity(response: str, metadata: dict[str, Any]) -> float:
    """The reward of a decoded response."""
    return float(len(response) % 2 == 0)
