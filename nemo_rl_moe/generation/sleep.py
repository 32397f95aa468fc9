"""What a sleeping engine has given back, and what it must have before it does anything."""

from __future__ import annotations

from collections.abc import Iterable

# vLLM's own names for the two kinds of memory that an engine takes on its device.
WEIGHTS, KV_CACHE = "weights", "kv_cache"
_ALL = frozenset({WEIGHTS, KV_CACHE})


class SleepState:
    """Keeps an engine from sampling with memory that it has given back, or with weights that it has dropped.

    vLLM itself would sample with what lies in the memory: a sleep of level 2 keeps no weights, and waking them brings
    back room for them, not their values. Only an update does.
    """

    def __init__(self) -> None:
        self._asleep: frozenset[str] = frozenset()
        self._dropped = False

    def fall_asleep(self) -> bool:
        """Everything is given back. Returns whether anything was awake."""
        changed = self._asleep != _ALL
        self._asleep, self._dropped = _ALL, True
        return changed

    def wake(self, tags: Iterable[str] | None) -> list[str]:
        """The given memory is taken again, all of it for None. Returns what of it was asleep."""
        woken = self._asleep & (_ALL if tags is None else frozenset(tags))
        self._asleep -= woken
        return sorted(woken)

    def updated(self) -> None:
        """The weights are whole."""
        self._dropped = False

    def check_ready_for_update(self) -> None:
        """Raises RuntimeError when there is no room for weights."""
        if WEIGHTS in self._asleep:
            raise RuntimeError("the engine's weights are asleep: wake them before an update")

    def check_ready_to_sample(self) -> None:
        """Raises RuntimeError when memory is given back or the weights were dropped."""
        if self._asleep:
            raise RuntimeError(f"the engine is asleep ({', '.join(sorted(self._asleep))}): wake it before it samples")
        if self._dropped:
            raise RuntimeError("the engine dropped its weights when it slept: update them before it samples")
