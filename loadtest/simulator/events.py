"""The virtual clock: callbacks in order of time, equal times in the order in which they were asked for."""

import heapq
from collections.abc import Callable
from typing import Any


class EventQueue:
    """Everything that happens in a simulation happens in one of these callbacks. Times are in ms."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, when_ms: float, call: Callable[..., None], *args: Any) -> None:
        """Call at that time; a time that has passed means now."""
        self._num_pushed += 1
        heapq.heappush(self._heap, (max(when_ms, self.now_ms), self._num_pushed, call, args))

    def after(self, wait_ms: float, call: Callable[..., None], *args: Any) -> None:
        """Call so much later."""
        self.at(self.now_ms + wait_ms, call, *args)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Until it is over or nothing is left to happen. Cost: O(log n) an event."""
        heap, pop = self._heap, heapq.heappop
        while heap and not is_over():
            when_ms, _, call, args = pop(heap)
            assert when_ms >= self.now_ms, "time goes forward"
            self.now_ms = when_ms
            self.num_events += 1
            call(*args)
