"""The virtual clock: callbacks in order of time, equal times in the order in which they were asked for."""

import heapq
import math
from collections.abc import Callable
from typing import Any

Event = tuple[float, int, Callable[..., None], tuple[Any, ...]]


class EventQueue:
    """Everything that happens in a simulation happens in one of these callbacks. Times are in ms."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.num_events = 0
        self._heap: list[Event] = []
        self._ticks: list[Event] = []
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._heap) + len(self._ticks)

    @property
    def next_ms(self) -> float:
        """When something happens that is no tick; infinite: nothing does."""
        return self._heap[0][0] if self._heap else math.inf

    def at(self, when_ms: float, call: Callable[..., None], *args: Any) -> None:
        """Call at that time; a time that has passed means now."""
        self._push(self._heap, when_ms, call, args)

    def tick_at(self, when_ms: float, call: Callable[..., None], *args: Any) -> None:
        """The same of what comes again and again, whatever happens: next_ms does not count it."""
        self._push(self._ticks, when_ms, call, args)

    def _push(
        self, heap: list[Event], when_ms: float, call: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        self._num_pushed += 1
        heapq.heappush(heap, (max(when_ms, self.now_ms), self._num_pushed, call, args))

    def after(self, wait_ms: float, call: Callable[..., None], *args: Any) -> None:
        """Call so much later."""
        self.at(self.now_ms + wait_ms, call, *args)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Until it is over or nothing is left to happen. Cost: O(log n) an event."""
        heap, ticks, pop = self._heap, self._ticks, heapq.heappop
        while (heap or ticks) and not is_over():
            when_ms, _, call, args = pop(ticks if ticks and (not heap or ticks[0] < heap[0]) else heap)
            assert when_ms >= self.now_ms, "time goes forward"
            self.now_ms = when_ms
            self.num_events += 1
            call(*args)
