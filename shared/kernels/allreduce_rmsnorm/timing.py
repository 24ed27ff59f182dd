"""Times of calls that all ranks make together: graphs of them, replayed; of each replay the slowest rank's."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

ROUNDS = 9
WARM_ROUNDS = 2
REPLAY_US = 4000.0  # a replay holds so many calls that it takes about this long
MOST_CALLS = 40

Call = Callable[[], Any]


class Clock:
    """Times calls on this rank's stream, beside the other ranks."""

    def __init__(
        self, device: torch.device, group: dist.ProcessGroup | None = None, *, rounds: int = ROUNDS
    ) -> None:
        self._device, self._group, self._rounds = device, group, rounds
        self._stream = torch.cuda.Stream(device)
        self._word = torch.zeros(1, device=device)

    def _together(self) -> None:
        dist.all_reduce(self._word, group=self._group)
        torch.cuda.synchronize(self._device)

    def _replays(
        self, call: Call, count: int, rounds: int, capture: AbstractContextManager[None]
    ) -> list[float]:
        """us a call of each replay, of this rank."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog asks after its events meanwhile
        with capture, torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            for _ in range(count):
                call()
        times = []
        for _ in range(rounds):
            self._together()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            with torch.cuda.stream(self._stream):
                dist.all_reduce(self._word, group=self._group)  # all ranks begin as one
                begin.record()
                graph.replay()
                end.record()
            torch.cuda.synchronize(self._device)
            times.append(begin.elapsed_time(end) * 1000 / count)
        return times

    def _slowest(self, times: Sequence[float]) -> list[float]:
        mine = torch.tensor(times, dtype=torch.float64, device=self._device)
        dist.all_reduce(mine, dist.ReduceOp.MAX, group=self._group)
        return mine.tolist()

    def measure(
        self, call: Call, capture: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> list[float]:
        """us of a call, a value a replay, the slowest rank's: equal on all ranks."""
        with torch.cuda.stream(self._stream):
            call()
        torch.cuda.synchronize(self._device)
        guess = min(self._slowest(self._replays(call, 2, 2, capture())))
        count = max(1, min(MOST_CALLS, int(REPLAY_US / guess)))
        times = self._replays(call, count, WARM_ROUNDS + self._rounds, capture())
        return [round(one, 2) for one in self._slowest(times)[WARM_ROUNDS:]]
