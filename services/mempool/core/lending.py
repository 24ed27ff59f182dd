"""Loans between the spaces of this mempool: where their pages come from, what lies in them, how they come back. No I/O.

    Offer -> engines of the producer give pages back, which are set aside -> Grant: taken -> blocks that leave the
    consumer's space are copied there first, host memory takes the rest; a reader gets them back as from any space
    (pulls.py) -> over: no block comes any more, those there leave for host memory; forgotten at the deadline

The rules are in loans.py. What is lent to one space by another is a space of its own (loan_pool.py), so that blocks are
found, copied, published and evicted as everywhere; only copies are told the producer's pages. A consumer needs host
memory behind it (`dram_bytes`), for what finds no lent page and for what has to leave one. AQUA, sections 6 and 7.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from services.mempool.core.actions import Action, PoolLimits
from services.mempool.core.claims import Claim
from services.mempool.core.dram import Dram
from services.mempool.core.leases import Fence
from services.mempool.core.lending_copies import LendingCopies
from services.mempool.core.loan_pool import LoanPool, why_not
from services.mempool.core.loans import Grant, Loan, LoanRefused, Loans, Offer, Shelf
from services.mempool.core.pool import Pool
from services.mempool.core.pools import Pools
from services.mempool.core.space import Memory
from shared.errors import InvalidRequest
from shared.ids import Epoch, InstanceId, PageId
from shared.lending.budget import SLOWEST_BYTES_PER_S
from shared.lending.rules import DEFAULT_RULES
from shared.wire import lending as market
from shared.wire import mempool as wire
from shared.wire import mempool_lending as calls
from shared.wire.lending_limits import check_grant, check_offer

MAX_TTL_MS = market.MAX_DURATION_MS
MAX_SHELVES = 512  # tables of a few bytes a page, without memory; they stay until one of two spaces ends


@dataclass(slots=True)
class _Collecting:
    offer: Offer
    claim: Claim
    until_ms: int


class Lending:
    """Of one mempool.

    Args:
        pools: of all spaces; spaces of lent pages are added.
        space_of: number of an instance's space; None when it has none here.
        touched: called with every pool that a later flush() must bring up to date.
    """

    def __init__(
        self,
        limits: PoolLimits,
        boot_generation: Epoch,
        fence: Fence,
        pools: Pools,
        dram: Dram,
        space_of: Callable[[InstanceId], int | None],
        touched: Callable[[Pool], None],
    ) -> None:
        self._limits, self._fence = limits, fence
        self.loans = Loans(boot_generation)
        self._pools, self._dram, self._space_of, self._touched = pools, dram, space_of, touched
        self._collecting: dict[str, _Collecting] = {}
        self.known_offers: dict[str, market.Offer] = {}
        self.known_grants: dict[str, market.Grant] = {}
        self.max_ttl_ms = MAX_TTL_MS
        self.on_change: Callable[[], None] | None = None  # called when a report would say something new
        # called with a space that pages are to leave, whether some are overdue, and the time
        self.on_wanted_back: Callable[[int, bool, int], None] = lambda *_: None
        self.on_overdue: Callable[[int], None] = lambda _: None  # then, if nothing else has brought them
        self.num_read: Callable[[int], int] = lambda _: 0  # pages of a space that engines read in place
        self.rules = DEFAULT_RULES
        self.loans.moved_in_ms = self._moved_in_ms
        self._num_changes = self._now_ms = 0
        self.shelves: dict[int, Shelf] = {}  # by number of the space of lent pages
        self.copies = LendingCopies(
            self.shelves, self.unit_bytes, lambda number: pools[number].is_dram, limits.pull_patience_ms
        )
        dram.borrowed = self.borrowed

    # -- what is said -----------------------------------------------------------------------------

    def on_call(self, pool: Pool, connection: int, call: calls.LendingCall, now_ms: int) -> None:
        """Answered at once, by LendingDone or CallFailed."""
        try:
            num_bytes = self._decide(call, now_ms)
        except LoanRefused as refused:
            self.loans.counters["lending_refused"] += 1
            failed = wire.CallFailed(call_id=call.call_id, code=refused.code, reason=refused.message)
            pool.say(connection, failed)
        else:
            is_offer = isinstance(call, calls.PresentOffer)
            rate = self.copies.limit_of(int(call.offer.space)) if is_offer else 0
            done = calls.LendingDone(call_id=call.call_id, num_bytes=num_bytes, budget_bytes_per_s=rate)
            pool.say(connection, done)
        self._touched(pool)

    def _decide(self, call: calls.LendingCall, now_ms: int) -> int:
        match call:
            case calls.PresentOffer():
                offer = self.know(call.offer, now_ms)
                return offer.limit * self.unit_bytes(offer.producer)
            case calls.PresentGrant():
                loan = self.take(call.grant, now_ms)
                return loan.num_pages * self.unit_bytes(loan.offer.producer)
            case calls.PresentReclaim():
                self.reclaim(call.order, now_ms)
            case calls.RenewLoan():
                if not self.loans.renew(call.lease_id, min(max(0, call.ttl_ms), MAX_TTL_MS), now_ms):
                    raise LoanRefused("lease.ended", f"{call.lease_id} is over, or on its way back")
                loan = self.loans.loans[call.lease_id]
                return loan.keep * self.unit_bytes(loan.offer.producer)  # a part of it may be on its way back
            case calls.ReleaseLoan():
                self.loans.release(call.lease_id, now_ms)
        return 0

    def know(self, offer: market.Offer, now_ms: int) -> Offer:
        """An offer of one of these spaces: its pages are set aside from now on, as engines give them back.

        Raises: LoanRefused.
        """
        with _refusing():
            check_offer(offer)
        if offer.boot_generation != self.loans.boot_generation:
            raise LoanRefused("epoch.stale", "the offer was made for an earlier mempool")
        memory = self._memory(int(offer.space))
        if memory is None or memory.is_behind:
            raise LoanRefused("space.unknown", f"space {offer.space} has no memory to lend")
        if self._is_gone(int(offer.space)):
            raise LoanRefused("producer.gone", f"nobody lives who could take space {offer.space} back")
        num_pages = min(offer.length_bytes // self.unit_bytes(int(offer.space)), memory.table.num_pages)
        known = offer.offer_id in self.loans.offers
        made = self.loans.know(offer.offer_id, int(offer.space), num_pages, memory.table)
        if not known:
            self.known_offers[offer.offer_id] = offer
            self._collect(made, now_ms)
        return made

    def take(self, grant: market.Grant, now_ms: int) -> Loan:
        """Accept a grant for a space of this mempool. Raises: LoanRefused; nothing has changed then."""
        with _refusing():
            check_grant(grant)
        consumer = self._space_of(grant.consumer)
        offer = self.loans.offers.get(grant.offer_id)
        if offer is None:
            raise LoanRefused("offer.unknown", f"no offer {grant.offer_id}")
        if consumer is None:
            raise LoanRefused("consumer.unknown", f"{grant.consumer} has no space here")
        self._make_shelf(offer.producer, consumer)
        loan = self.loans.take(
            Grant(
                grant.lease_id, grant.offer_id, grant.consumer, consumer,
                grant.length_bytes // self.unit_bytes(offer.producer), grant.token, grant.boot_generation,
                min(max(0, grant.ttl_ms), MAX_TTL_MS),
            ),
            now_ms,
        )  # fmt: skip
        self.known_grants[grant.lease_id] = grant
        return loan

    def reclaim(self, order: market.ReclaimOrder, now_ms: int) -> None:
        """The offer is worth less: its loans fit by the deadline. Raises: LoanRefused."""
        offer = self.loans.offers.get(order.offer_id)
        keep = order.keep_bytes // self.unit_bytes(offer.producer) if offer is not None else 0
        self.loans.reclaim(order.offer_id, keep, now_ms + max(0, order.deadline_ms), now_ms)
        if offer is not None:
            self._touched(self._pools[offer.producer])

    def on_process_dead(self, now_ms: int) -> None:
        """Somebody died: loans end whose consumers' processes are all gone, and offers of who lived only to lend."""
        for offer in [x for x in self.loans.offers.values() if x.limit and self._is_gone(x.producer)]:
            num_bytes = self.loans.lent(offer) * self.unit_bytes(offer.producer)
            deadline_ms = self._reclaim_ms(offer.producer, num_bytes)
            self.loans.reclaim(offer.offer_id, 0, now_ms + deadline_ms, now_ms)
            self._touched(self._pools[offer.producer])
        for number in {loan.space for loan in self.loans.loans.values()}:
            memory = self._memory(number)
            if memory is not None and not memory.engines.attached and not memory.engines.lost:
                self.loans.consumer_dead(number, now_ms)

    def _is_gone(self, number: int) -> bool:
        """Whether the space is one of who only lends, and no process of it lives. Of others the coordinator hears."""
        pool, memory = self._pools[number], self._memory(number)
        if memory is None or not memory.only_lends or pool.awaited():
            return False
        return not (memory.engines.attached or memory.engines.lost or memory.engines.ranks)

    # -- pages ------------------------------------------------------------------------------------

    def _collect(self, offer: Offer, now_ms: int) -> None:
        claim = self._pools[offer.producer].claim(self.loans.lacking(offer), lends=True)
        self._collecting[offer.offer_id] = _Collecting(offer, claim, now_ms + self._limits.offer_patience_ms)
        self._touched(self._pools[offer.producer])

    def _set_aside(self, now_ms: int) -> None:
        for offer_id, one in list(self._collecting.items()):
            pool, claim = self._pools[one.offer.producer], one.claim
            pages, claim.pages = claim.pages, []
            self.loans.set_aside(one.offer, pages)
            claim.wanted = self.loans.lacking(one.offer)
            if claim.wanted and now_ms < one.until_ms:
                continue
            pool.claims.remove(claim)
            self.loans.settle_for(one.offer)
            self.loans.counters["offers_settled"] += 1
            del self._collecting[offer_id]
            self._touched(pool)

    def _make_shelf(self, producer: int, consumer: int) -> None:
        """Raises: LoanRefused when the one cannot lend to the other."""
        if (producer, consumer) in self.loans.shelves:
            return
        lender, borrower = self._pools[producer], self._pools[consumer]
        why = why_not(lender, borrower) or (
            "" if consumer in self._dram.tiers else "no host memory is behind the borrower"
        )
        if why:
            raise LoanRefused("offer.unfit", f"space {producer} cannot lend to space {consumer}: {why}")
        if len(self.shelves) >= MAX_SHELVES or self._pools.is_used_up:
            raise LoanRefused("loans.full", f"{MAX_SHELVES} pairs of spaces have lent to each other")
        number = self._pools.next_number
        made = LoanPool(self._limits, self.loans.boot_generation, number, self._fence, lender, borrower)
        assert made.memory is not None
        self._pools[number] = made
        shelf = Shelf(number, producer, consumer, made.memory.table)
        self.loans.shelves[producer, consumer] = self.shelves[number] = shelf
        self._dram.link()

    def borrowed(self, consumer: int) -> Sequence[int]:
        """Spaces of pages lent to this one that take blocks now."""
        return [
            number
            for number, shelf in self.shelves.items()
            if shelf.consumer == consumer
            and shelf.lent
            and not self.loans.wanted_back(shelf)
            and self.copies.is_open(shelf.producer, self._now_ms)
        ]

    def wanted_back(self, number: int) -> int:
        """Pages that are to leave this space of lent pages."""
        return self.loans.wanted_back(self.shelves[number]) if number in self.shelves else 0

    def distance(self, pool: Pool) -> int:
        """Which of two spaces that have a block is read: engines' first, then lent pages, then host memory."""
        if isinstance(pool, LoanPool):
            return 1 if self.copies.is_open(pool.producer.number, self._now_ms) else 3
        return 2 if pool.is_dram else 0

    # -- every event ------------------------------------------------------------------------------

    def advance(self, now_ms: int) -> None:
        """Take everything as far as it goes. Cost: nothing without offers."""
        self._now_ms = now_ms
        self._advance(now_ms)
        num_changes = self.loans.counters.total()
        if self.on_change is not None and num_changes != self._num_changes:
            self.on_change()
        self._num_changes = num_changes

    def _advance(self, now_ms: int) -> None:
        if self._collecting:
            self._set_aside(now_ms)
        if len(self.known_offers) > len(self.loans.offers):
            self._forget()
        if not self.loans.loans:
            return
        self.loans.excuse(now_ms)
        self.loans.tick(now_ms)
        for number, shelf in self.shelves.items():
            if self.loans.wanted_back(shelf):
                self._bring_back(self._pools[number], shelf, now_ms)
        self._forget()

    def _forget(self) -> None:
        """What is over."""
        for lease_id in [x for x in self.known_grants if x not in self.loans.loans]:
            del self.known_grants[lease_id]
        for offer_id in [x for x in self.known_offers if x not in self.loans.offers]:
            del self.known_offers[offer_id]

    def _bring_back(self, pool: Pool, shelf: Shelf, now_ms: int) -> None:
        overdue = self._take_back(pool, shelf)
        if self.loans.wanted_back(shelf):
            self.on_wanted_back(shelf.number, overdue > 0, now_ms)
            if self._take_back(pool, shelf):
                self.on_overdue(shelf.number)
        if (left := self.loans.wanted_back(shelf)) and self.copies.is_open(shelf.producer, now_ms):
            self._dram.drain(shelf.number, left, now_ms)

    def _take_back(self, pool: Pool, shelf: Shelf) -> int:
        """What holds nothing and, past a deadline, only cached blocks. How many pages are overdue still."""
        back = self.loans.collect(shelf)
        dropping = self.loans.wanted_back(shelf, dropping=True)
        while dropping > shelf.table.num_free and pool.evict():
            self.loans.counters["blocks_dropped"] += 1
        if back + self.loans.collect(shelf):
            self._touched(self._pools[shelf.producer])
        return self.loans.wanted_back(shelf, dropping=True)

    def is_lending(self, number: int) -> bool:
        """Whether pages of this space are on loan."""
        return any(shelf.producer == number and shelf.lent for shelf in self.shelves.values())

    def is_collecting(self, offer_id: str) -> bool:
        """Whether engines still give back pages for this offer."""
        return offer_id in self._collecting

    def tick_at_ms(self) -> int | None:
        """When advance() has something to do without an event."""
        due = [self.loans.next_deadline_ms(), *(one.until_ms for one in self._collecting.values())]
        due.append(self.copies.next_ms(self._now_ms))
        return min((when for when in due if when is not None), default=None)

    # -- copies -----------------------------------------------------------------------------------

    def issue(
        self,
        copies: Sequence[Action],
        now_ms: int,
        has_reader: Callable[[int], bool],
        goes_first: Callable[[int], bool] = lambda _: False,
        evacuates: Callable[[int], bool] = lambda _: False,
    ) -> tuple[list[Action], list[int]]:
        """Copies that begin now, of and into the pages that were lent, and numbers of those that are refused.

        Args: has_reader, goes_first, evacuates: of the copy with this number.
        """
        return self.copies.issue(
            copies, now_ms, has_reader=has_reader, goes_first=goes_first, evacuates=evacuates,
            dropping=lambda shelf: self.loans.wanted_back(shelf, dropping=True) > 0,
        )  # fmt: skip

    def by_space(self, number: int, pages: Iterable[PageId]) -> Mapping[int, list[PageId]]:
        """Pages of a space as copies know them, by the space whose they are."""
        out: dict[int, list[PageId]] = {}
        for page in pages:
            mine = (n for n, s in self.shelves.items() if s.producer == number and page in s.lent)
            out.setdefault(next(mine, number), []).append(page)
        return out

    # -- looking ----------------------------------------------------------------------------------

    def counters(self) -> Counter[str]:
        """Of all loans."""
        found = Counter({f"lending_{name}": count for name, count in self.loans.counters.items()})
        if self.copies.num_refused:
            found["lending_copies_refused"] = self.copies.num_refused
        return found

    def num_back(self, number: int) -> int | None:
        """Blocks that this space had back from host memory, since its start. None: there is none behind it."""
        return self.copies.num_back[number] if number in self._dram.tiers else None

    def num_moved(self, number: int) -> int:
        """Blocks that were copied into and out of pages lent to this space."""
        mine = (shelf.number for shelf in self.shelves.values() if shelf.consumer == number)
        return self.copies.num_ended[number] + sum(self.copies.num_moved.get(each, 0) for each in mine)

    def num_read_by(self, number: int) -> int:
        """Pages lent to this space that its engines read in place now."""
        return sum(self.num_read(shelf.number) for shelf in self.shelves.values() if shelf.consumer == number)

    def _moved_in_ms(self, loan: Loan) -> int:
        """Who reads in place is killed where it takes longer to move what is there: as much time as a reclaim gives.
        0: nobody does."""
        producer = loan.offer.producer
        num_read = self.num_read(self.loans.shelves[producer, loan.space].number)
        if not num_read:
            return 0
        return self._reclaim_ms(producer, num_read * self.unit_bytes(producer))

    def _reclaim_ms(self, producer: int, num_bytes: int) -> int:
        """For so many bytes to come home to a space whose owner does not say how soon it wants them."""
        return self.rules.deadline_ms(num_bytes, self.copies.limit_of(producer) or SLOWEST_BYTES_PER_S)

    def _memory(self, number: int) -> Memory | None:
        pool = self._pools.get(number)
        return pool.memory if pool is not None else None

    def unit_bytes(self, number: int) -> int:
        """Of a page of this space, on all ranks."""
        memory = self._memory(number)
        assert memory is not None
        return memory.page_bytes * memory.num_ranks


@contextmanager
def _refusing() -> Iterator[None]:
    """What the coordinator would not take from a report is not known here either."""
    try:
        yield
    except InvalidRequest as error:
        raise LoanRefused(error.code, error.message) from error
