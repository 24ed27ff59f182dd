"""HBM and DRAM: which blocks move between the two, when, and what is dropped. No I/O: copies go out as actions.

    fast (HBM) --- swap_out, or fewer than begin_free_ratio pages free --> slow (DRAM) --- full: LRU leaves --> dropped
               <-- swap_in ---------------------------------------------

A block on its way out stays in the fast index, pinned, until its copy is complete: it can be hit meanwhile, and
then it stays in both. A block that was swapped in keeps its page in DRAM too, aged, as long as there is room:
swapping it out again costs no copy. The two page sets never share a page, so a page has one state at every moment.
Source: MemServe Table 1 (swap_out, swap_in) and 4.2; one CopyPages is one batched copy (PR 38460).
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from services.mempool.core.entry import Entry
from services.mempool.core.own_pages import OwnPages
from services.mempool.core.tier_actions import CopyPages, CopyResult, SwapDone, TierAction, TierLimits
from shared.errors import InvariantBroken, Overloaded
from shared.ids import BlockHash, Epoch, PageId, SpaceId


@dataclass(slots=True)
class _Ticket:
    number: int  # 0: the watermark's
    way: Literal["out", "in"]
    left: int = 0  # out: blocks still to pick
    until_ms: int = 0  # out: so long it waits for more to be unpinned
    waiting: list[tuple[int, Entry]] = field(default_factory=list)  # in: (position, slow entry), last first
    num_in_flight: int = 0
    done: list[Entry | None] = field(default_factory=list)


@dataclass(slots=True)
class _Copy:
    ticket: _Ticket
    source: OwnPages
    target: OwnPages
    entries: list[Entry]  # of the source
    positions: list[int]  # in: of the ticket's `done`
    action: CopyPages


class Tiers:
    """Methods return the actions to perform, in order.

    Args:
        fast, slow: pages of the same kind of block. Several Tiers may have one slow space.
        elsewhere: says now whether a third space has a block; then it needs no copy to leave by itself.
        ask_unpin: asks whoever caches fast blocks without using them to unpin so many; how many that may be.
        peers: pages lent by other spaces, the best first: what leaves by itself goes there while some are free.
    `counters`: blocks out, in, freed without a copy, dropped.
    """

    def __init__(
        self,
        fast: OwnPages,
        slow: OwnPages,
        limits: TierLimits,
        elsewhere: Callable[[], Callable[[BlockHash], bool]] | None = None,
        ask_unpin: Callable[[int], int] | None = None,
        peers: Callable[[], Sequence[OwnPages]] = tuple,
    ) -> None:
        self.fast = fast
        self.slow = slow
        self.limits = limits
        self._elsewhere = elsewhere
        self._ask_unpin = ask_unpin
        self._peers = peers
        self.counters: Counter[str] = Counter()
        self.quarantined: dict[SpaceId, set[PageId]] = {fast.space: set(), slow.space: set()}
        self._doubted: dict[SpaceId, OwnPages] = {}  # spaces with quarantined pages, once
        self._copies: dict[int, _Copy] = {}
        self.tickets: list[_Ticket] = []
        self._auto = _Ticket(0, "out")
        self._next_number = 1
        self._num_in_flight = 0
        self.num_leaving = 0  # fast pages that come free when their copies end
        self._is_low = False
        self._failed_until_ms = 0
        self._retry_at_ms = 0  # of the watermark: later than that also where nothing could leave
        self._actions: list[TierAction] = []

    # -- calls --------------------------------------------------------------------------------------

    def swap_out(self, num_blocks: int, now_ms: int) -> tuple[int, list[TierAction]]:
        """Move the coldest unpinned blocks to DRAM: the ticket whose SwapDone ends it, perhaps among the actions.

        Where fewer are unpinned, those that engines only cache go too, as they let go of them, `ask_ms` at most. Fewer
        move when fewer could, or when DRAM has no room that may be taken. Raises: Overloaded when max_tickets are open.
        """
        ticket = self._new_ticket("out")
        ticket.left = max(0, num_blocks)
        lacking = ticket.left - self.fast.num_unpinned
        if lacking > 0 and self._ask_unpin is not None and (asked := self._ask_unpin(lacking)):
            ticket.left -= lacking - asked
            ticket.until_ms = now_ms + self.limits.ask_ms
        return ticket.number, self.tick(now_ms)

    def swap_in(self, entries: Sequence[Entry], now_ms: int) -> tuple[int, list[TierAction]]:
        """Bring blocks of the slow space to HBM. Raises: Overloaded when max_tickets are open."""
        ticket = self._new_ticket("in")
        ticket.done = [None] * len(entries)
        self.slow.index.pin(entries)
        ticket.waiting = list(enumerate(entries))[::-1]
        return ticket.number, self.tick(now_ms)

    def make_room(self, count: int = 1) -> bool:
        """Free so many fast pages at once, for whoever cannot wait for copies. False when every leaf is pinned."""
        gone = self.fast.evict_some(count)
        kept = sum(entry.block_hash in self.slow.index for entry in gone)
        self.counters["blocks_freed"] += kept
        self.counters["blocks_evicted"] += len(gone) - kept
        return bool(gone)

    def leave(self, lacking: int, now_ms: int) -> bool:
        """No fast page is free, and `lacking` are wanted: copies begin as far as the limits let them, and beyond that
        blocks are evicted. False: no page is free now, as many as are wanted are leaving, or every leaf is pinned.
        """
        for ticket in self.tickets:  # what was asked to leave goes first
            if ticket.way == "out":
                self._send_out(ticket, now_ms)
        if self.num_leaving < lacking and now_ms >= self._failed_until_ms:
            self._send_some(lacking - self.num_leaving)
            if self.fast.num_free:
                return True
        return self.num_leaving < lacking and self.make_room(lacking - self.num_leaving)

    def drain(self, count: int, now_ms: int) -> None:
        """So many blocks are to leave, the coldest first, as far as the limits let them; said again until they have."""
        if now_ms >= self._failed_until_ms:
            self._send_some(count - self.num_leaving)

    def tick(self, now_ms: int) -> list[TierAction]:
        """Begin what can begin. Call it after pages were granted, sealed or unpinned, and at next_deadline_ms()."""
        for ticket in sorted(
            self.tickets, key=lambda ticket: ticket.way, reverse=True
        ):  # out makes room for in
            if ticket.way == "in":
                self._bring_in(ticket)
            else:
                self._send_out(ticket, now_ms)
            if not (ticket.left or ticket.waiting or ticket.num_in_flight):
                self.tickets.remove(ticket)
                self._actions.append(SwapDone(ticket.number, ticket.done))
        self._keep_free(now_ms)
        actions, self._actions = self._actions, []
        return actions

    def next_deadline_ms(self, now_ms: int) -> int | None:
        """When tick() may have something to do that no event announces."""
        return self._retry_at_ms if self._is_low and self._retry_at_ms > now_ms else None

    def ticket_deadline_ms(self) -> int | None:
        """When a swap has waited long enough for unpinned blocks."""
        return min(
            (ticket.until_ms for ticket in self.tickets if ticket.left and ticket.until_ms), default=None
        )

    # -- answers ------------------------------------------------------------------------------------

    def on_copied(self, copy_id: int, result: CopyResult, now_ms: int) -> list[TierAction]:
        """A copy ended. Raises: InvariantBroken for one that is not under way."""
        copy = self._copies.pop(copy_id, None)
        if copy is None:
            raise InvariantBroken(f"copy {copy_id} is not under way")
        self._num_in_flight -= len(copy.entries)
        copy.ticket.num_in_flight -= len(copy.entries)
        source, target, action = copy.source, copy.target, copy.action
        stale = set(range(len(copy.entries)) if result.failed else result.stale)
        for i, entry in enumerate(copy.entries):
            if not source.is_current(entry.page, action.source_epochs[i]):
                stale.add(i)
        quarantined = set(result.quarantined).intersection(action.target_pages)
        if quarantined:
            self._doubted[target.space] = target
            self.quarantined.setdefault(target.space, set()).update(quarantined)
        arrived = self._take_in(copy, stale, quarantined)
        if None in arrived:
            self.counters["copies_failed"] += 1
            self._failed_until_ms = self._retry_at_ms = now_ms + self.limits.retry_ms
        if copy.ticket.way == "out":
            self._end_out(copy, arrived)
        else:
            self._end_in(copy, arrived)
        return self.tick(now_ms)

    def on_settled(self, space: SpaceId, pages: Collection[PageId], now_ms: int) -> list[TierAction]:
        """Nothing can write these quarantined targets any more."""
        settled = self.quarantined[space] & set(pages)
        if settled:
            self.quarantined[space] -= settled
            self._doubted[space].give_up(sorted(settled))
        return self.tick(now_ms)

    def _take_in(self, copy: _Copy, stale: set[int], doubted: set[PageId]) -> list[Entry | None]:
        """Of each block what its target has now, perhaps another page; None: it did not come."""
        arrived: list[Entry | None] = [None] * len(copy.entries)
        settled = [(i, page) for i, page in enumerate(copy.action.target_pages) if page not in doubted]
        copy.target.give_up([page for i, page in settled if i in stale])
        # parents first: they make one branch
        good = [(i, page) for i, page in reversed(settled) if i not in stale]
        here = copy.target.take_in([copy.entries[i].at(page) for i, page in good])
        for (i, _), entry in zip(good, here, strict=True):
            arrived[i] = entry
        return arrived

    def _end_out(self, copy: _Copy, arrived: list[Entry | None]) -> None:
        self.num_leaving -= len(copy.entries)
        there = [entry for entry, new in zip(copy.entries, arrived, strict=True) if new is not None]
        gone = self.fast.index.left(there)
        self.fast.index.stayed([e for e, new in zip(copy.entries, arrived, strict=True) if new is None])
        self.fast.retire(gone)
        self.counters["blocks_out"] += len(gone)
        self.counters["peer_blocks_out"] += len(gone) if copy.target is not self.slow else 0
        names = {entry.block_hash for entry in gone}
        copy.ticket.done += [new for new in arrived if new is not None and new.block_hash in names]

    def _end_in(self, copy: _Copy, arrived: list[Entry | None]) -> None:
        self.slow.index.unpin(copy.entries)
        there = [new for new in arrived if new is not None]
        self.fast.index.pin(there)
        for position, new in zip(copy.positions, arrived, strict=True):
            copy.ticket.done[position] = new
        self.counters["blocks_in"] += len(there)
        self.slow.index.age(
            [entry for entry, new in zip(copy.entries, arrived, strict=True) if new is not None]
        )

    # -- out ----------------------------------------------------------------------------------------

    def _keep_free(self, now_ms: int) -> None:
        """The watermark, with hysteresis."""
        free = self.fast.num_free + self.num_leaving
        total = self.fast.num_pages
        self._is_low = (
            free < (self.limits.end_free_ratio if self._is_low else self.limits.begin_free_ratio) * total
        )
        if self._is_low and now_ms >= self._retry_at_ms:
            self._send_some(int(self.limits.end_free_ratio * total) - free)
            if self.fast.num_free + self.num_leaving == free:  # everything is pinned, or on its way back
                self._retry_at_ms = now_ms + self.limits.pause_ms

    def _send_some(self, count: int) -> None:
        self._auto.left = count
        self._send_out(self._auto, 0)
        self._auto.left = 0
        self._auto.done = []

    def _send_out(self, ticket: _Ticket, now_ms: int) -> None:
        while ticket.left > 0:
            room = self.limits.max_pages_in_flight - self._num_in_flight
            count = min(ticket.left, room, self.limits.max_pages_per_copy)
            if count <= 0:
                return
            picked = self.fast.index.take_coldest(count)
            if not picked:
                if now_ms >= ticket.until_ms:
                    ticket.left = 0
                return
            ticket.left -= len(picked)
            peers = [peer for peer in self._peers() if peer.num_free] if ticket is self._auto else []
            elsewhere = self._elsewhere() if ticket is self._auto and self._elsewhere is not None else None
            known, unknown = list[Entry](), list[Entry]()
            for entry in picked:
                (known if self._is_kept(entry.block_hash, peers, elsewhere) else unknown).append(entry)
            self._free_copied(ticket, known)
            if unknown and not self._start_out(ticket, unknown, peers):
                ticket.left = 0
                return

    def _is_kept(
        self, block_hash: BlockHash, peers: Sequence[OwnPages], elsewhere: Callable[[BlockHash], bool] | None
    ) -> bool:
        """Whether it may leave without a copy. Who asked for a swap is told where in DRAM each block is.

        A block that only DRAM has is worth a copy to a peer with room: it comes back sooner (AQUA 9.4 moves it there).
        But not what somebody pins there: a swap has just had it copied (swaps.py), and a second copy would take the
        place and the time of another's first.
        """
        if (there := self.slow.index.get(block_hash)) is not None:
            return there.pins > 0 or not peers or any(block_hash in peer.index for peer in peers)
        return elsewhere is not None and elsewhere(block_hash)

    def _free_copied(self, ticket: _Ticket, known: list[Entry]) -> None:
        """They have a page in DRAM already: no byte has to move."""
        gone = self.fast.index.left(known)
        self.fast.retire(gone)
        self.counters["blocks_freed"] += len(gone)
        ticket.done += self.slow.used(gone[::-1])

    def _start_out(self, ticket: _Ticket, picked: list[Entry], peers: Sequence[OwnPages]) -> bool:
        """False when DRAM could not take all of them. Who asked for a swap finds its blocks in DRAM."""
        for peer in peers:
            pages, epochs = peer.take(len(picked))
            going, picked = picked[: len(pages)], picked[len(pages) :]
            self._go(ticket, going, peer, pages, epochs)
        if peers:
            self._free_copied(ticket, [entry for entry in picked if entry.block_hash in self.slow.index])
            picked = [entry for entry in picked if entry.block_hash not in self.slow.index]
        if not picked:
            return True
        while self.slow.num_free < len(picked) and self._drop():
            pass
        pages, epochs = self.slow.take(len(picked))
        going, staying = picked[: len(pages)], picked[len(pages) :]
        self.fast.index.stayed(staying)
        self._go(ticket, going, self.slow, pages, epochs)
        return not staying

    def _go(
        self, ticket: _Ticket, going: list[Entry], target: OwnPages, pages: list[PageId], epochs: list[Epoch]
    ) -> None:
        if going:
            self.num_leaving += len(going)
            self._start(ticket, going, [], self.fast, target, pages, epochs)

    def _drop(self) -> bool:
        entry = self.slow.evict()
        if entry is not None:
            kept = entry.block_hash in self.fast.index
            self.counters["copies_dropped" if kept else "blocks_dropped"] += 1
        return entry is not None

    # -- in -----------------------------------------------------------------------------------------

    def _bring_in(self, ticket: _Ticket) -> None:
        while ticket.waiting:
            here = self.fast.index.get(ticket.waiting[-1][1].block_hash)
            if here is not None:
                position, entry = ticket.waiting.pop()
                self.slow.index.unpin([entry])
                self.fast.index.pin([here])
                self.fast.index.prefix([here.block_hash])
                ticket.done[position] = here
                continue
            room = self.limits.max_pages_in_flight - self._num_in_flight
            count = min(len(ticket.waiting), room, self.limits.max_pages_per_copy)
            if count <= 0:
                return
            pages, epochs = self.fast.take(count)
            if not pages:
                if self._make_way(len(ticket.waiting)):
                    continue
                if not self.num_leaving:
                    self.slow.index.unpin([entry for _, entry in ticket.waiting])
                    ticket.waiting = []
                return
            chosen = [ticket.waiting.pop() for _ in pages]
            entries = [entry for _, entry in chosen]
            self._start(
                ticket, entries, [position for position, _ in chosen], self.slow, self.fast, pages, epochs
            )

    def _make_way(self, count: int) -> bool:
        """No fast page is free: send others out. Whether one is free now; otherwise some may be leaving."""
        if not self.num_leaving:
            self._send_some(count)
        return self.fast.num_free > 0

    # -- parts --------------------------------------------------------------------------------------

    def _start(
        self,
        ticket: _Ticket,
        entries: list[Entry],
        positions: list[int],
        source: OwnPages,
        target: OwnPages,
        pages: list[PageId],
        epochs: list[Epoch],
    ) -> None:
        target.begin(pages)
        action = CopyPages(
            self._number(),
            source.space,
            [entry.page for entry in entries],
            [Epoch(source.table.epochs[entry.page]) for entry in entries],
            target.space,
            pages,
            epochs,
        )
        self._copies[action.copy_id] = _Copy(ticket, source, target, entries, positions, action)
        ticket.num_in_flight += len(entries)
        self._num_in_flight += len(entries)
        self._actions.append(action)

    def _new_ticket(self, way: Literal["out", "in"]) -> _Ticket:
        if len(self.tickets) >= self.limits.max_tickets:
            raise Overloaded(f"{self.limits.max_tickets} swaps are under way")
        ticket = _Ticket(self._number(), way)
        self.tickets.append(ticket)
        return ticket

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number - 1
