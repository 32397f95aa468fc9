"""Plain classes that tests host in real Ray actors."""

from __future__ import annotations

import os
import time

from nemo_rl_moe.errors import RunFailed, UserError


class Echo:
    """Answers with its rank; misbehaves when asked to."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def add(self, base: int, own: int = 0) -> tuple[int, int]:
        return self.rank, base + own

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def sleep_on(self, rank: int, seconds: float) -> None:
        if self.rank == rank:
            time.sleep(seconds)

    def exit_on(self, rank: int) -> None:
        """The other ranks wait, as they would in a collective whose peer is gone."""
        if self.rank == rank:
            print("last words of the worker", flush=True)
            os._exit(17)
        time.sleep(60)

    def refuse(self) -> None:
        raise UserError("prompt 3 has 9 tokens, expected at most 8")

    def give_up(self) -> None:
        raise RunFailed("the engine is unusable: half of its weights are old")

    def fail_on(self, rank: int) -> None:
        if self.rank == rank:
            raise ValueError("wrong shape")
        time.sleep(60)
