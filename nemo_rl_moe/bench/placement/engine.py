"""Generation in virtual time: engines that share their speed between the requests in flight.

All requests in flight on an engine get their next token in the same decode step. So an engine is a processor-sharing
queue: one counter of steps serves all of its requests, and a request ends when the counter has moved by its length.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable

from nemo_rl_moe.bench.placement.workload import GenerationSpeed


class Engine:
    """One engine.

    Args:
        speed: of one device.
        devices: devices of the engine; its requests spread over them.
    """

    def __init__(self, speed: GenerationSpeed, devices: int) -> None:
        self._latency_s = speed.decode_latency_s
        self._request_s = 1 / (speed.peak_tokens_per_second * devices)
        self._limit = math.inf if speed.max_requests is None else speed.max_requests * devices
        self._clock = self._steps = self.busy_s = self.request_s = 0.0
        self._running: list[tuple[float, int]] = []
        self._waiting: deque[tuple[float, int]] = deque()

    @property
    def load(self) -> int:
        """Requests in flight and waiting."""
        return len(self._running) + len(self._waiting)

    @property
    def next_end(self) -> float:
        """Time of the next end of a request, in seconds; infinite when there is none."""
        if not self._running:
            return math.inf
        return self._clock + max(0.0, self._running[0][0] - self._steps) * self._step_s

    @property
    def _step_s(self) -> float:
        return self._latency_s + len(self._running) * self._request_s

    def advance(self, until: float) -> None:
        """Moves the clock to a time not after `next_end`."""
        if self._running:
            elapsed = until - self._clock
            self._steps += elapsed / self._step_s
            self.busy_s += elapsed
            self.request_s += elapsed * len(self._running)
        self._clock = until

    def submit(self, tokens: float, group: int) -> None:
        """Adds a request of so many tokens now."""
        self._waiting.append((tokens, group))
        self._start()

    def end(self) -> int:
        """Moves the clock to `next_end` and returns the group of the request that ends."""
        self.advance(self.next_end)
        ends, group = heapq.heappop(self._running)
        self._steps = ends
        self._start()
        return group

    def pause(self, seconds: float) -> None:
        """Lets time pass in which no token is generated; requests keep their place."""
        self._clock += seconds

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._limit:
            tokens, group = self._waiting.popleft()
            heapq.heappush(self._running, (self._steps + tokens, group))


class Fleet:
    """Equal engines; a request goes to the least loaded.

    Args:
        speed: of one device.
        num_engines: engines.
        engine_size: devices of one engine.
    """

    def __init__(self, speed: GenerationSpeed, num_engines: int, engine_size: int) -> None:
        self._engines = [Engine(speed, engine_size) for _ in range(num_engines)]
        self._devices = num_engines * engine_size
        self._ends: list[tuple[float, int]] = []

    @property
    def next_end(self) -> float:
        """Time of the next end of a request; infinite when there is none."""
        return self._ends[0][0] if self._ends else math.inf

    @property
    def busy_s(self) -> float:
        """Seconds with a request in flight since the start, mean over devices."""
        return sum(engine.busy_s for engine in self._engines) / len(self._engines)

    @property
    def request_s(self) -> float:
        """Integral of the requests in flight over time since the start, mean over devices."""
        return sum(engine.request_s for engine in self._engines) / self._devices

    def submit(self, requests: Iterable[tuple[float, int]], now: float) -> None:
        """Adds requests (tokens, group) at a time that no request ends before."""
        self._advance(now)
        loads = [(engine.load, index) for index, engine in enumerate(self._engines)]
        heapq.heapify(loads)
        for tokens, group in requests:
            load, index = loads[0]
            self._engines[index].submit(tokens, group)
            heapq.heapreplace(loads, (load + 1, index))
        self._reschedule()

    def end(self) -> tuple[float, int]:
        """The next request to end: its time and group."""
        time, index = self._ends[0]
        engine = self._engines[index]
        group = engine.end()
        if math.isinf(engine.next_end):
            heapq.heappop(self._ends)
        else:
            heapq.heapreplace(self._ends, (engine.next_end, index))
        return time, group

    def pause(self, now: float, seconds: float) -> None:
        """Stops all engines from a time that no request ends before, for so many seconds."""
        self._advance(now)
        for engine in self._engines:
            engine.pause(seconds)
        self._reschedule()

    def _advance(self, now: float) -> None:
        for engine in self._engines:
            engine.advance(now)

    def _reschedule(self) -> None:
        self._ends = [(e.next_end, i) for i, e in enumerate(self._engines) if not math.isinf(e.next_end)]
        heapq.heapify(self._ends)
