"""Room in a simulated engine's pages: what it reports of it, and which handed-over prompts begin (shared/room).

As shared/engine/worker_room.py, over figures of this moment. How long an answer gets is known here.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from loadtest.simulator.blocks import BlockStore
from loadtest.simulator.held import held_tokens
from loadtest.simulator.task import Task
from shared.room.growth import Need, growth_pages
from shared.room.queue import Figures
from shared.wire.reports import Room

MOST_SHARE = 0.75  # of all pages: as a worker's, who may need more waits for no more


@dataclass(frozen=True, slots=True)
class Queues:
    """An engine's own: requests by where they are."""

    decoding: Mapping[tuple[str, int], Task]
    prefilling: Sequence[Task]
    ready: Collection[Task]
    loading: Collection[Task]
    waiting: Collection[Task]


class EnginePages:
    """Args: unit_tokens: of a page. wait_ms: so long a prompt waits for room at most; 0: nobody counts."""

    def __init__(self, store: BlockStore, unit_tokens: int, wait_ms: float, queues: Queues) -> None:
        self._store, self._unit, self._wait_ms, self._queues = store, unit_tokens, wait_ms, queues
        self._num_pages = store.capacity_tokens // unit_tokens
        self.row_tokens = 0  # memory of steps that are under way, which nobody counts as held yet

    def now(self, num_steps: int) -> Room | None:
        """For a report, after so many steps of the engine. Cost: O(those that wait), and O(requests) unless all that
        may be needed leaves room for anybody."""
        if not self._wait_ms:
            return None
        handed = [task for task in self._queues.waiting if self._is_handed(task)]
        others = [task for task in self._queues.waiting if not self._is_handed(task)]
        free, queued = self._free, [self._new(task) for task in handed]
        owed = sum(need.held + need.more for need in queued)
        most = self._store.promised_tokens + sum(task.final_tokens for task in others)
        least = self._num_pages - self._pages(most) - owed
        if least < MOST_SHARE * self._num_pages:
            owed += growth_pages(self._needs(num_steps), in_use=self._num_pages - free)
            return Room(self._num_pages, free, owed)
        return Room(self._num_pages, free, free - least)

    def keeps_waiting(self, task: Task, num_steps: int, now_ms: float) -> bool:
        """The first of those that wait. Cost: O(requests) for a handed-over prompt."""
        if not self._is_handed(task) or now_ms >= task.queued_at_ms + self._wait_ms:
            return False
        needs, free = self._needs(num_steps), self._free
        figures = Figures(self._num_pages, free, self._num_pages - free, needs, 0)
        return bool(needs) and figures.lacking([self._new(task)]) > 0

    def _is_handed(self, task: Task) -> bool:
        return self._wait_ms > 0.0 and task.stage == "decode" and not task.made

    @property
    def _free(self) -> int:
        return max(0, self._store.room_tokens + self.row_tokens) // self._unit

    def _new(self, task: Task) -> Need:
        """Of one that has nothing here yet: its last block is copied."""
        most = int(MOST_SHARE * self._num_pages)
        begin = min(most, self._pages(task.request.prompt_tokens) + 1)
        return Need(begin, min(most - begin, self._pages(task.request.output_tokens)))

    def _needs(self, num_steps: int) -> list[Need]:
        """Of all but handed-over prompts that wait for room."""
        queues = self._queues
        waiting = (task for task in queues.waiting if not self._is_handed(task))
        out: list[Need] = []
        for task in chain(queues.decoding.values(), queues.prefilling, queues.ready, queues.loading, waiting):
            grown = num_steps - task.joined_step if task.state == "decoding" else 0
            held = self._pages(held_tokens(task) + grown)
            out.append(Need(held, max(0, self._pages(task.final_tokens) - held)))
        return out

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._unit)
