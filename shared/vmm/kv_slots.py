"""vAttention's interface over real memory: init, alloc_reqid, free_reqid, step (vAttention Table 4, Algorithm 1).

slots.py decides, a window maps, a mapper does it in the background. step() answers ok or "cannot"; it waits for the
mapper only when a page that this very step needs is not mapped yet, and counts that.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shared.errors import ClusterError
from shared.vmm.book import runs
from shared.vmm.errors import BadMapping
from shared.vmm.interface import Op, PageSource, PageWindow
from shared.vmm.kv_layouts import KvLayout, LayerViews
from shared.vmm.mapper import Mapper, open_mapper
from shared.vmm.slot_commands import Command, Map
from shared.vmm.slots import SlotTable, Step


@dataclass(slots=True)
class SlotCounters:
    """Since the start. Calls on the critical path: `inline_ops`, and waits for the mapper."""

    steps: int = 0
    refused_steps: int = 0
    inline_ops: int = 0
    background_ops: int = 0
    waits: int = 0
    waited_s: float = 0.0


class KvSlots:
    """Request slots over pages of one source. One thread uses it.

    Args:
        source: layout.num_tensors pages for each block page; their sizes agree.
        pages: block pages that are granted from the start; None: all that the source has.
        native: see open_mapper().
        reclaim_ratio, ahead_tokens, eager_pages: see SlotTable.
    Raises: BadMapping when source and layout do not fit; VmmError.
    """

    def __init__(
        self,
        layout: KvLayout,
        source: PageSource,
        *,
        pages: Iterable[int] | None = None,
        native: bool = True,
        reclaim_ratio: float = 0.10,
        ahead_tokens: int = 8,
        eager_pages: int = 4,
    ) -> None:
        geometry = layout.geometry
        if source.page_bytes != geometry.page_bytes or source.num_pages % layout.num_tensors:
            raise BadMapping(
                f"{source.num_pages} pages of {source.page_bytes} B; groups of {layout.num_tensors} pages of "
                f"{geometry.page_bytes} B are needed"
            )
        self.layout = layout
        self.source = source
        self.num_pages = source.num_pages // layout.num_tensors
        self.counters = SlotCounters()
        self.table = SlotTable(
            layout.num_slots, layout.slot_pages, geometry.block_tokens,
            reclaim_ratio=reclaim_ratio, ahead_tokens=ahead_tokens, eager_pages=eager_pages,
        )  # fmt: skip
        self.table.grant(range(self.num_pages) if pages is None else pages)
        self.window: PageWindow = source.window(layout.num_indices)
        try:
            self._mapper: Mapper = open_mapper(self.window, native=native)
        except ClusterError:
            self.window.close()
            raise
        self._tickets: deque[tuple[int, int]] = deque()  # batch, ticket

    # ---- vAttention's four

    def alloc_reqid(self, prefix: Sequence[int] = (), expected_tokens: int = 0) -> int | None:
        """See SlotTable.alloc_reqid()."""
        return self.table.alloc_reqid(prefix, expected_tokens)

    def free_reqid(self, reqid: int, fence: int = 0) -> None:
        """See SlotTable.free_reqid(). `fence` numbers the step or event behind which nothing touches the slot."""
        self.table.free_reqid(reqid, fence)

    def step(self, seq_lens: Sequence[int], next_lens: Sequence[int] | None = None) -> bool:
        """Whether every active slot is backed up to its length now; False: preempt somebody, or try again later.

        Raises: BadMapping for impossible lengths; VmmError when the kernel or driver refused a call, TooManyMappings
            included: then the window is not what the table says, and the process has to end.
        """
        self.collect()
        self.counters.steps += 1
        answer = self.table.step(seq_lens, next_lens)
        self._execute(answer)
        if not answer.ok and answer.num_returning >= answer.num_short:
            self._wait(self._mapper.submitted)  # pages are on their way out: worth waiting for
            self.collect()
            answer = self.table.step(seq_lens, next_lens)
            self._execute(answer)
        if not answer.ok:
            self.counters.refused_steps += 1
            return False
        tickets = [ticket for batch, ticket in self._tickets if batch <= answer.wait_for]
        if tickets:
            self._wait(tickets[-1])
        return True

    # ---- sharing, fences, memory

    def passed(self, fence: int) -> None:
        """See SlotTable.passed()."""
        self.table.passed(fence)

    def collect(self) -> None:
        """Tell the table what the mapper has done."""
        done = self._mapper.done
        while self._tickets and self._tickets[0][1] <= done:
            self.table.ack(self._tickets.popleft()[0])

    def shrink(self, count: int) -> list[int]:
        """Give up to `count` block pages back to the system; returns them. Fewer when pages of ended requests have to
        be unmapped first: that begins now, in the background; call again. Cost: releasing; no wait.
        """
        self.collect()
        taken = self.table.give_back(count)
        self._submit(*self.table.flush())
        for _, first, number in runs(sorted(taken)):
            for tensor in range(self.layout.num_tensors):
                self.source.release(self.layout.sub_page(first, tensor, self.num_pages), number)
        return taken

    def grow(self, pages: Sequence[int]) -> None:
        """These block pages, given back before or granted by a mempool, are the table's again.

        Raises: OutOfPages when the system has no memory; BadMapping.
        """
        for _, first, number in runs(sorted(pages)):
            for tensor in range(self.layout.num_tensors):
                self.source.acquire(self.layout.sub_page(first, tensor, self.num_pages), number)
        self.table.grant(pages)

    def drain(self) -> None:
        """Wait until everything is mapped that was asked for."""
        self._wait(self._mapper.submitted)
        self.collect()

    def close(self) -> None:
        """Stop the mapper and give the addresses back; nothing may touch the window any more."""
        self._mapper.close()
        self.window.close()

    # ---- inside

    def _execute(self, answer: Step) -> None:
        now = self._ops(answer.now)
        if now and answer.ok and answer.wait_for == answer.now_batch:
            self.counters.inline_ops += len(now)
            self._mapper.run(now)  # needed at once: no detour through the thread when it has nothing to do
            self._tickets.append((answer.now_batch, self._mapper.submitted))
        else:
            self._submit_ops(answer.now_batch, now)
        self._submit(answer.now_batch + 1, answer.later)
        self.collect()

    def _submit(self, batch: int, commands: Sequence[Command]) -> None:
        self._submit_ops(batch, self._ops(commands))

    def _submit_ops(self, batch: int, ops: list[Op]) -> None:
        self.counters.background_ops += len(ops)
        ticket = self._mapper.submit(ops) if ops else self._mapper.submitted
        self._tickets.append((batch, ticket))

    def _ops(self, commands: Sequence[Command]) -> list[Op]:
        ops: list[Op] = []
        layout, places = self.layout, self.layout.num_places
        for command in commands:
            for tensor in range(layout.num_tensors):
                at = tensor * places + command.first
                if isinstance(command, Map):
                    pages = [layout.sub_page(page, tensor, self.num_pages) for page in command.pages]
                    ops += self.window.plan_map(at, pages, writable=command.writable)
                else:
                    ops += self.window.plan_unmap(at, command.num_places)
        return ops

    def _wait(self, ticket: int) -> None:
        if self._mapper.done >= ticket:
            return
        begin = time.perf_counter()
        self._mapper.wait(ticket)
        self.counters.waits += 1
        self.counters.waited_s += time.perf_counter() - begin


def init(layout: KvLayout, source: PageSource) -> tuple[KvSlots, tuple[LayerViews, ...]]:
    """vAttention's init: (the slots, K and V of each layer as strided views of `slots.window.span()`)."""
    return KvSlots(layout, source), layout.views
