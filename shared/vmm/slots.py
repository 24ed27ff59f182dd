"""vAttention's request slots: which page lies at which place, decided without I/O (vAttention 5.2, 5.3, 6.1).

A slot ("reqId") is a stretch of `slot_pages` consecutive places. While its request runs, pages are mapped there up to
its length; when it ends, they stay until they are needed (deferred reclamation). What becomes of a page: slot_pages.py.

Commands come out in batches with growing numbers; they are executed in order, and ack() says how far. A slot's pages
are unmapped only after the fence given to free_reqid() has passed. Page ids are the caller's (its mempool's).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.vmm.errors import BadMapping
from shared.vmm.slot_commands import Command, Map, Unmap, merged
from shared.vmm.slot_pages import SlotPages

HOLE = -1


class Step(NamedTuple):
    """What step() decided: execute `now` as batch `now_batch`, then `later` as the next one, in the background.

    ok: the step may run once batch `wait_for` is executed. Otherwise nothing was mapped for it: `num_returning` pages
    come free when the batches so far are acknowledged; if `num_short` is more, a request has to be preempted.
    """

    ok: bool
    wait_for: int
    now_batch: int
    now: list[Command]
    later: list[Command]
    num_short: int = 0
    num_returning: int = 0


@dataclass(slots=True)
class _Slot:
    pages: list[int] = field(default_factory=list)  # HOLE where nothing is mapped
    batches: list[int] = field(default_factory=list)  # in which batch each place was mapped
    aliased: int = 0  # leading places that may be read-only mappings: never written in place again
    front: int = 0  # leading places without a hole
    settled: int = 0  # leading places whose mapping is executed
    active: bool = False
    fence: int = 0  # may be unmapped once this has passed
    freed_at: int = 0  # for the order of reclamation
    quiet_tokens: int = 0  # up to this length a step needs nothing here


class SlotTable:
    """Deciding half of KvSlots.

    Args:
        slot_pages: places of one slot: pages of the longest request.
        page_tokens: tokens whose KV one page (in layer-major: one group of pages) holds.
        reclaim_ratio: reclaim pages of ended requests when fewer than this share is free (vAttention 6.1.2).
        ahead_tokens: map the next page in the background when a request comes this near to it (6.1.1).
        eager_pages: keep so many mapped in one idle slot for the next request (6.1.2).
    Cost: step() about 0.15 us for each running request that needs nothing, some us for each mapped page.
    """

    def __init__(
        self,
        num_slots: int,
        slot_pages: int,
        page_tokens: int,
        *,
        reclaim_ratio: float = 0.10,
        ahead_tokens: int = 8,
        eager_pages: int = 4,
    ) -> None:
        if min(num_slots, slot_pages, page_tokens) <= 0 or not 0 <= reclaim_ratio < 1:
            raise BadMapping(f"{num_slots} slots of {slot_pages} pages of {page_tokens} tokens")
        self.num_slots = num_slots
        self.slot_pages = slot_pages
        self.page_tokens = page_tokens
        self.ahead_tokens = ahead_tokens
        self.eager_pages = min(eager_pages, slot_pages)
        self._reclaim_ratio = reclaim_ratio
        self._slots = [_Slot() for _ in range(num_slots)]
        self._pages = SlotPages()
        self._pending: list[Command] = []  # of the batch that the next step() closes
        self._batch = 1
        self._acked = 0
        self._passed = 0
        self._frees = 0

    # ---- pages come and go

    def grant(self, pages: Iterable[int]) -> None:
        """These pages are the table's to map. Raises: BadMapping when it has one already."""
        self._pages.grant(pages)

    def give_back(self, count: int) -> list[int]:
        """Up to `count` free pages, which are the caller's from now on. When fewer are free, pages of ended requests
        are unmapped for the rest (flush() them): ask again after their acknowledgement.
        """
        taken = self._pages.give_back(count)
        self._reclaim(count - len(taken) - self._pages.num_returning(), self._pending, self._batch)
        return taken

    def take_foreign(self) -> list[int]:
        """Aliased pages that were never granted: once for each pin of the caller that may go."""
        return self._pages.take_foreign()

    @property
    def num_free(self) -> int:
        """Pages that could be mapped at once."""
        return self._pages.num_free

    @property
    def num_owned(self) -> int:
        """Pages granted and not given back."""
        return len(self._pages.owned)

    def pages_of(self, reqid: int) -> list[int]:
        """The pages at the slot's places, HOLE for none."""
        return list(self._slots[reqid].pages)

    def check(self) -> None:
        """Own invariants; for tests."""
        self._pages.check()

    # ---- requests

    def alloc_reqid(self, prefix: Sequence[int] = (), expected_tokens: int = 0) -> int | None:
        """A slot for a new request; None when all are taken, or what lies in them cannot be unmapped yet.

        Args:
            prefix: sealed pages to alias at the slot's beginning, or another's: the caller holds a pin on each
                until take_foreign() returns it. A request that would write the last of them passes one fewer.
            expected_tokens: picks the slot whose leftover pages fit best.
        Raises: BadMapping when a page of `prefix` is not sealed or not pinned.
        """
        for page in prefix:
            if not self._pages.may_alias(page):
                raise BadMapping(f"page {page} is not sealed and pinned")
        if len(prefix) > self.slot_pages:
            raise BadMapping(f"a prefix of {len(prefix)} pages in a slot of {self.slot_pages}")
        for reqid in self._candidates(prefix, expected_tokens):
            slot = self._slots[reqid]
            stale = self._stale(slot, prefix)
            if not stale or slot.fence <= self._passed:
                self._take(reqid, slot, prefix, stale)
                return reqid
        return None

    def free_reqid(self, reqid: int, fence: int = 0) -> None:
        """The request ended. Its pages stay mapped; they may be unmapped once `fence` has passed.

        Raises: BadMapping when the slot is not active.
        """
        slot = self._slots[reqid]
        if not slot.active:
            raise BadMapping(f"slot {reqid} has no request")
        self._frees += 1
        slot.active, slot.fence, slot.freed_at = False, max(fence, slot.fence), self._frees

    def passed(self, fence: int) -> None:
        """All work that was submitted up to this fence is done."""
        self._passed = max(self._passed, fence)

    def ack(self, batch: int) -> None:
        """All commands up to this batch are executed: pages that they unmapped for good are free."""
        assert batch < self._batch, (batch, self._batch)
        self._acked = max(self._acked, batch)
        self._pages.ack(batch)

    def seal(self, reqid: int, num_pages: int) -> list[int]:
        """The slot's first pages are complete and never written again. Returns them all; the caller pins what it keeps.

        Raises: BadMapping unless so many are mapped.
        """
        slot = self._slots[reqid]
        if not slot.active or num_pages > slot.front:
            raise BadMapping(f"slot {reqid} has {slot.front} pages, not {num_pages}")
        found = slot.pages[:num_pages]
        self._pages.seal(found)
        return found

    def pin(self, page: int) -> None:
        """One more reason to keep a sealed page. Raises: BadMapping when it is not sealed."""
        self._pages.pin(page)

    def unpin(self, page: int) -> None:
        """Raises: BadMapping when there is no pin."""
        self._pages.unpin(page)

    def is_private(self, reqid: int, position: int) -> bool:
        """Whether the request may write the page at this place: nobody else can see it (architecture, rule 3)."""
        slot = self._slots[reqid]
        if not slot.aliased <= position < slot.front:
            return False
        page = slot.pages[position]
        return not self._pages.is_sealed(page) and self._pages.is_reusable(page)

    def step(self, seq_lens: Sequence[int], next_lens: Sequence[int] | None = None) -> Step:
        """Have every active slot backed up to its length; never raises for lack of memory.

        Args:
            seq_lens: tokens per slot after this step, 0 for idle slots.
            next_lens: after the next step, where that is known (chunked prefill); mapped in the background.
        Raises: BadMapping when a length does not fit its slot or the slot is idle.
        """
        busy: list[tuple[_Slot, int, int]] = []  # slot, its number, pages needed
        short, ahead, wait_for = 0, [], 0
        for reqid, tokens in enumerate(seq_lens):
            slot = self._slots[reqid]
            coming = tokens if next_lens is None else max(tokens, next_lens[reqid])
            if coming <= slot.quiet_tokens and slot.active:
                continue
            if not slot.active:
                if tokens:
                    raise BadMapping(f"slot {reqid} is idle and has {tokens} tokens")
                continue
            need = self._pages_for(tokens)
            if max(need, self._pages_for(coming)) > self.slot_pages:
                raise BadMapping(f"{max(tokens, coming)} tokens in a slot of {self.slot_pages} pages")
            busy.append((slot, reqid, need))
            soon = min(need + 1, self._pages_for(tokens + self.ahead_tokens))
            ahead.append(max(self._pages_for(coming), soon))
            holes = sum(page == HOLE for page in slot.pages[slot.front : need])
            short += holes + max(0, need - len(slot.pages))
        if short > self._pages.num_free:
            return self._cannot(short)
        for slot, reqid, need in busy:
            self._fill(slot, reqid, need, self._batch, self._pending)
            wait_for = max(wait_for, self._unsettled(slot, need))
        later: list[Command] = []
        batch, now = self.flush()
        for (slot, reqid, _), most in zip(busy, ahead, strict=True):
            self._fill(slot, reqid, min(most, self.slot_pages), batch + 1, later)
            backed = min(slot.settled, slot.front) * self.page_tokens
            full = slot.front == self.slot_pages and slot.settled == slot.front
            slot.quiet_tokens = backed if full else backed - self.ahead_tokens
        self._reclaim(self._reserve() - self._pages.num_free - self._pages.num_returning(), later, batch + 1)
        self._map_eagerly(later, batch + 1)
        return Step(True, wait_for, batch, now, merged(later))

    def flush(self) -> tuple[int, list[Command]]:
        """(batch, commands) of what was asked for since the last step. The number behind it is used up as well."""
        pending, self._pending = self._pending, []
        batch, self._batch = self._batch, self._batch + 2
        return batch, merged(pending)

    # ---- inside

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def _reserve(self) -> int:
        return int(self._reclaim_ratio * len(self._pages.owned))

    def _cannot(self, short: int) -> Step:
        """Nothing is mapped; what was asked for before and what can be reclaimed goes out now."""
        short -= self._pages.num_free
        self._reclaim(short - self._pages.num_returning(), self._pending, self._batch)
        batch, now = self.flush()
        return Step(False, 0, batch, now, [], short, self._pages.num_returning())

    def _candidates(self, prefix: Sequence[int], expected_tokens: int) -> list[int]:
        """Idle slots, the best first: the same beginning; else an empty one for a prefix, the best fit without."""
        want = self._pages_for(expected_tokens)

        def rank(reqid: int) -> tuple[int, int, int]:
            slot = self._slots[reqid]
            pages = slot.pages
            if prefix and pages and pages[0] == prefix[0]:
                return (0, -len(pages), reqid)
            if prefix:
                return (1, len(pages), reqid)
            fits = len(pages) >= max(1, want)
            return (1, len(pages) if fits else self.slot_pages + 1 - len(pages), reqid)

        return sorted((i for i, slot in enumerate(self._slots) if not slot.active), key=rank)

    def _stale(self, slot: _Slot, prefix: Sequence[int]) -> list[int]:
        """Places whose page has to go before the slot can serve a request with this prefix."""
        stale = []
        for place, page in enumerate(slot.pages):
            if page == HOLE:
                continue
            if place < len(prefix):
                if page != prefix[place]:
                    stale.append(place)
            elif place < slot.aliased or not self._pages.is_reusable(page):
                stale.append(place)
        return stale

    def _take(self, reqid: int, slot: _Slot, prefix: Sequence[int], stale: list[int]) -> None:
        for place in stale:
            self._unmap(reqid, slot, place, self._batch, self._pending)
        self._pages.unseal(page for page in slot.pages[len(prefix) :] if page != HOLE)  # written again
        base = reqid * self.slot_pages
        for place, page in enumerate(prefix):
            if place < len(slot.pages) and slot.pages[place] == page:
                self._pages.foreign_left(page)  # the mapping's old pin; the caller has brought another
                continue
            self._pages.place(page)
            self._enter(slot, place, page, self._batch)
            self._pending.append(Map(base + place, (page,), False))
        slot.aliased = len(prefix)
        slot.settled = 0
        slot.active, slot.quiet_tokens = True, -1
        self._advance(slot)

    def _fill(self, slot: _Slot, reqid: int, need: int, batch: int, commands: list[Command]) -> None:
        """Map free pages into the holes of the first `need` places, as far as there are free pages."""
        base = reqid * self.slot_pages
        for place in range(slot.front, need):
            if place < len(slot.pages) and slot.pages[place] != HOLE:
                continue
            if not self._pages.num_free:
                break
            page = self._pages.take()
            self._enter(slot, place, page, batch)
            commands.append(Map(base + place, (page,), True))
        self._advance(slot)

    @staticmethod
    def _enter(slot: _Slot, place: int, page: int, batch: int) -> None:
        if place == len(slot.pages):
            slot.pages.append(page)
            slot.batches.append(batch)
        else:
            slot.pages[place], slot.batches[place] = page, batch

    def _unmap(self, reqid: int, slot: _Slot, place: int, batch: int, commands: list[Command]) -> None:
        page, slot.pages[place] = slot.pages[place], HOLE
        commands.append(Unmap(reqid * self.slot_pages + place, 1))
        self._pages.remove(page, batch)
        slot.front, slot.settled = min(slot.front, place), min(slot.settled, place)

    @staticmethod
    def _advance(slot: _Slot) -> None:
        while slot.front < len(slot.pages) and slot.pages[slot.front] != HOLE:
            slot.front += 1

    def _unsettled(self, slot: _Slot, need: int) -> int:
        """The batch that must be executed before the first `need` places can be used; 0 for none."""
        while slot.settled < slot.front and slot.batches[slot.settled] <= self._acked:
            slot.settled += 1
        return max(slot.batches[slot.settled : need], default=0)

    def _reclaim(self, wanted: int, commands: list[Command], batch: int) -> None:
        """Unmap ended requests' pages, the longest ended first, until `wanted` more will come free."""
        if wanted <= 0:
            return
        idle = [i for i, s in enumerate(self._slots) if not s.active and s.pages and s.fence <= self._passed]
        for reqid in sorted(idle, key=lambda i: self._slots[i].freed_at):
            slot = self._slots[reqid]
            for place in range(len(slot.pages) - 1, -1, -1):
                page = slot.pages[place]
                if page == HOLE:
                    continue
                self._unmap(reqid, slot, place, batch, commands)
                wanted -= self._pages.frees(page)
            slot.pages.clear()
            slot.batches.clear()
            slot.aliased = slot.front = slot.settled = 0
            if wanted <= 0:
                return

    def _map_eagerly(self, commands: list[Command], batch: int) -> None:
        spare = self._pages.num_free - self._reserve()
        idle = [i for i, slot in enumerate(self._slots) if not slot.active]
        if not idle or spare <= 0 or any(self._slots[i].front >= self.eager_pages for i in idle):
            return
        empty = next((i for i in idle if not self._slots[i].pages), None)
        if empty is not None:
            self._fill(self._slots[empty], empty, min(self.eager_pages, spare), batch, commands)
