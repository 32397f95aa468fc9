"""Which experts the tokens of a pass go to."""

from __future__ import annotations

from enum import Enum


class Routing(Enum):
    """Who chooses the experts of a pass over micro-batches."""

    OWN = "own"
    """The router."""
    RECORD = "record"
    """The router, and its choice is recorded."""
    REPLAY = "replay"
    """Whoever made the routes that the batch carries; the router for tokens without one."""
