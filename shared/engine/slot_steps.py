"""Before each step: the pages that it reads lie side by side in their requests' slots, or are on their way there.

The scheduler allocates blocks some tokens ahead (`ahead_tokens`), so that in steady decoding the mapper's thread maps a
page long before it is read; only a request's first pages are waited for, after the step's inputs were prepared.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from shared.vmm.request_slots import RequestSlots
from shared.vmm.slot_commands import Command


class Span(NamedTuple):
    """One request of a step: its query rows, its slot, its tokens after the step."""

    begin: int
    end: int
    slot: int
    tokens: int


class SlotMapper(Protocol):
    """What RequestWindow does."""

    def submit(self, commands: Sequence[Command]) -> int: ...
    def is_done(self, ticket: int) -> bool: ...
    def wait(self, ticket: int) -> None: ...


class Event(Protocol):
    """A mark in the device's work, e.g. torch.cuda.Event."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


@dataclass(slots=True)
class SlotCounters:
    """Since the start. On the critical path are the waits only."""

    steps: int = 0
    pages_now: int = 0  # mapped for the step that came with them
    pages_ahead: int = 0  # mapped in the background, before their first use
    waits: int = 0  # steps that waited for the mapper
    waited_s: float = 0.0
    fence_waits: int = 0  # times that the device had to finish a step before a slot could change


class SlotSteps:
    """Follows vLLM's scheduler outputs; one thread uses it.

    Args:
        tile_tokens: so far behind a request's end a kernel may load (and mask): a step waits for those places, too.
        record_event: marks the device's work so far; None on the CPU, where a step is over when it returns.
    """

    def __init__(
        self,
        table: RequestSlots,
        memory: SlotMapper,
        block_tokens: int,
        record_event: Callable[[], Event] | None,
        tile_tokens: int = 0,
    ) -> None:
        self.table = table
        self.counters = SlotCounters()
        self._memory = memory
        self._block_tokens = block_tokens
        self._tile_tokens = tile_tokens
        self._record_event = record_event
        self._step = 0
        self._events: deque[tuple[int, Event]] = deque()
        self._ahead: dict[
            str, deque[tuple[int, int]]
        ] = {}  # request: (first place, ticket) not known to be done
        self._tokens: dict[str, tuple[int, int]] = {}  # of the step: tokens before it, in it
        self._ticket = 0  # what the step has to wait for
        self.under_way = False

    def before(self, output: Any) -> None:
        """`output` is about to be executed.

        Raises: VmmError, BadMapping: this process cannot go on.
        """
        self._step += 1
        self.counters.steps += 1
        self._pass_fences()
        # whatever is over was in no step after the last one
        for request in (*output.finished_req_ids, *(output.preempted_req_ids or ())):
            self._end(request)
        self._memory.submit(self.table.trim())
        self._tokens = {}
        self._ticket = 0
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            self._end(new.req_id)  # a preempted one comes anew
            self._begin(new.req_id, new.block_ids[0])
            self._tokens[new.req_id] = (new.num_computed_tokens, scheduled[new.req_id])
        cached = output.scheduled_cached_reqs
        for request, ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            self._tokens[request] = (computed, scheduled[request])
            if request in cached.resumed_req_ids:
                self._end(request)
                self._begin(request, ids[0])
            elif ids is not None and ids[0]:
                self._grow(request, ids[0])
        for request in [r for r in self._ahead if r in self._tokens]:
            self._need(request)
        self.under_way = True

    def after(self) -> None:
        """Everything that the step reads of the slots is in the device's queue (on the CPU: done)."""
        self.under_way = False
        if self._record_event is None:
            self.table.passed(self._step)
        else:
            self._events.append((self._step, self._record_event()))

    def wait_mapped(self) -> None:
        """Until what the step reads is mapped. Raises: VmmError."""
        ticket, self._ticket = self._ticket, 0
        if ticket and not self._memory.is_done(ticket):
            begin = time.perf_counter()
            self._memory.wait(ticket)
            self.counters.waits += 1
            self.counters.waited_s += time.perf_counter() - begin

    def spans(self, requests: Sequence[str]) -> list[Span]:
        """Of the step's requests, in the order of their query rows."""
        spans: list[Span] = []
        at = 0
        for request in requests:
            computed, scheduled = self._tokens[request]
            spans.append(Span(at, at + scheduled, self.table.slot_of(request), computed + scheduled))
            at += scheduled
        return spans

    # ---- inside

    def _end(self, request: str) -> None:
        self._ahead.pop(request, None)
        self.table.end(request, self._step - 1)

    def _begin(self, request: str, block_ids: Sequence[int]) -> None:
        pages = [block_id - 1 for block_id in block_ids]
        change = self.table.begin(request, pages)
        while change is None:
            self.counters.fence_waits += 1
            self._wait_fence(self.table.fence())
            change = self.table.begin(request, pages)
        if change.commands:
            self.counters.pages_now += sum(len(c.pages) for c in change.commands if hasattr(c, "pages"))
            self._ticket = self._memory.submit(change.commands)

    def _grow(self, request: str, block_ids: Sequence[int]) -> None:
        first = self.table.length(request)
        change = self.table.grow(request, [block_id - 1 for block_id in block_ids])
        if not change.commands:
            return
        ticket = self._memory.submit(change.commands)
        num_pages = sum(len(c.pages) for c in change.commands if hasattr(c, "pages"))
        if self._is_read(request, first):
            self.counters.pages_now += num_pages
            self._ticket = max(self._ticket, ticket)
        else:
            self.counters.pages_ahead += num_pages
            self._ahead.setdefault(request, deque()).append((first, ticket))

    def _need(self, request: str) -> None:
        """Pages that were mapped in the background are read from this step on."""
        waiting = self._ahead[request]
        while waiting and (self._is_read(request, waiting[0][0]) or self._memory.is_done(waiting[0][1])):
            self._ticket = max(self._ticket, waiting.popleft()[1])
        if not waiting:
            del self._ahead[request]

    def _is_read(self, request: str, place: int) -> bool:
        """Whether the step's kernels may load what is there: to the end of the tile that holds the last token."""
        return place * self._block_tokens < sum(self._tokens[request]) + self._tile_tokens

    def _pass_fences(self) -> None:
        while self._events and self._events[0][1].query():
            self.table.passed(self._events.popleft()[0])

    def _wait_fence(self, fence: int) -> None:
        while self._events and self._events[0][0] <= fence:
            step, event = self._events.popleft()
            event.synchronize()
            self.table.passed(step)
