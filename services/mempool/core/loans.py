"""Pages that a space lends to another space of this mempool: offers, loans, and the fence. No I/O.

    offer --pages set aside--> aside --take(grant)--> on loan --blocks gone--> aside, or the producer's again
                                                                            (reclaimed, or the offer shrank)

The mempool owns the pages, and it alone decides what is lent: a grant is a wish until take() accepts it against the
pages that are set aside. Set-aside and lent pages are *leased* in the producer's page table: no engine gets them, and
only the mempool writes them. The consumer never maps them, it has its blocks copied there and back. So the sum of loans
on an offer is never more than was set aside for it, which is never more than was free. Counted in pages of the
producer; one holds one block of the consumer. A loan ends by its consumer's word or death, by its time, or by a
reclaim; in every case its blocks leave for host memory until a deadline, and are forgotten then: they are a cache.
What an engine reads in place is none: it has the time to move, and the engine ends with the deadline (far_moves.py).
What may still be read or written by a copy on its way is waited for, whatever the time (ARCHITECTURE.md, rule 5).
Source: AQUA, section 6, which has neither tokens nor deadlines; etcd's advice on locks (fencing).
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field

from services.mempool.core.loan_state import LoanEvent, LoanState, next_state
from services.mempool.core.page_state import PageEvent
from services.mempool.core.page_table import PageTable
from shared.errors import ResourceError
from shared.ids import Epoch, InstanceId, LeaseId, PageId
from shared.wire.lending import Token

GRACE_MS = 500  # so long the blocks of a loan that ended by itself may leave for host memory
LATE_MS = 250  # a loan's end that is seen so much later: the mempool stood still
EXCUSED_MS = 2_000  # and what was said meanwhile is read, and answered, within so long
MAX_OFFERS = 1_024
MAX_LOANS = 4_096
MAX_CLOSED = 8_192
MAX_ENDED = 65_536  # tokens of ended loans that the fence has not passed


NO_TOKEN = Token(0, 0)


class LoanRefused(ResourceError):
    """A grant, renewal or order that this mempool does not accept; `code` says why."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Grant:
    """What take() is asked: `num_pages` of an offer for a space. `boot_generation`: of the mempool it was made for."""

    lease_id: LeaseId
    offer_id: str
    consumer: InstanceId
    space: int  # the consumer's
    num_pages: int
    token: Token
    boot_generation: Epoch
    ttl_ms: int


@dataclass(slots=True)
class Offer:
    """`aside`: pages that are set aside for it and on no loan. `is_told`: a report said that it is worth nothing."""

    offer_id: str
    producer: int  # number of the space
    limit: int  # pages that it may lend
    table: PageTable  # of the producer
    aside: list[PageId] = field(default_factory=list)
    is_told: bool = False


@dataclass(slots=True)
class Loan:
    """`num_pages` counts until they are back; `keep` of them need not come back.

    `steps`: (keep, deadline) of orders that are not met, in the order of both: by that time it has no more than `keep`.
    """

    lease_id: LeaseId
    offer: Offer
    consumer: InstanceId
    space: int
    num_pages: int
    asked: int  # when it was taken
    keep: int
    token: Token
    ttl_ms: int  # that it was granted for
    expires_at_ms: int
    state: LoanState = LoanState.HELD
    steps: list[tuple[int, int]] = field(default_factory=list)
    has_lapsed: bool = False
    is_excused: bool = False  # since its last renewal

    @property
    def deadline_ms(self) -> int:
        """The next one, while it returns."""
        return self.steps[0][1] if self.steps else 0


class Shelf:
    """Pages of one producer on loan to one consumer; loans of the same two spaces share it.

    `table`: the consumer's side of them, page i here is page i there. Pages that are not on loan are withdrawn in it.
    """

    def __init__(self, number: int, producer: int, consumer: int, table: PageTable) -> None:
        self.number, self.producer, self.consumer, self.table = number, producer, consumer, table
        self.lent: set[PageId] = set()
        table.reserve([PageId(page) for page in range(table.num_pages)])
        table.take_withdrawn()

    def add(self, pages: Iterable[PageId]) -> None:
        """On loan from now on, and free for blocks."""
        new = list(pages)
        self.lent.update(new)
        self.table.restore(new)

    def take_free(self, count: int) -> list[PageId]:
        """Up to `count` pages that hold nothing, on loan no more. Cost: one pass over the free pages."""
        back = self.table.some_free(count)
        self.table.reserve(back)
        self.table.take_withdrawn()
        self.lent.difference_update(back)
        return back


class Loans:
    """Of one mempool. The caller finds pages for offers, has blocks leave, and says when pages of a shelf are free.

    `shelves`: by (producer, consumer), made by the caller.
    """

    def __init__(self, boot_generation: Epoch) -> None:
        self.boot_generation = boot_generation
        self.fence = NO_TOKEN
        self.offers: dict[str, Offer] = {}
        self.loans: dict[LeaseId, Loan] = {}
        self.shelves: dict[tuple[int, int], Shelf] = {}
        self.counters: Counter[str] = Counter()
        # so long whoever reads blocks of a loan in place may take to move them; 0: nobody does
        self.moved_in_ms: Callable[[Loan], int] = lambda _: 0
        self._ended: dict[Token, LeaseId] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()  # offers that were taken back, the last ones

    # -- offers -----------------------------------------------------------------------------------

    def know(self, offer_id: str, producer: int, num_pages: int, table: PageTable) -> Offer:
        """An offer that loans may be taken on, once pages are set aside for it. Said again: nothing changes.

        Raises: LoanRefused when it is of another space, was taken back, or there are too many.
        """
        if offer_id in self._closed:
            raise LoanRefused("offer.ended", f"offer {offer_id} was taken back")
        known = self.offers.get(offer_id)
        if known is not None and known.producer != producer:
            raise LoanRefused("offer.stale", f"offer {offer_id} is of space {known.producer}")
        if known is not None:
            return known
        if len(self.offers) >= MAX_OFFERS:
            for idle in list(self.offers.values()):
                self._forget(idle)
        if len(self.offers) >= MAX_OFFERS:
            raise LoanRefused("offers.full", f"{MAX_OFFERS} offers are known")
        made = self.offers[offer_id] = Offer(offer_id, producer, max(0, num_pages), table)
        return made

    def lent(self, offer: Offer) -> int:
        """Pages of it on loan, also those that are on their way back."""
        return sum(loan.num_pages for loan in self.loans.values() if loan.offer is offer)

    def lacking(self, offer: Offer) -> int:
        """Pages that are to be set aside for it still."""
        return max(0, offer.limit - len(offer.aside) - self.lent(offer))

    def set_aside(self, offer: Offer, pages: Iterable[PageId]) -> None:
        """Pages that table.take_many() gave for it. What it does not need goes back."""
        offer.aside += pages
        self._give_back(offer)

    def settle_for(self, offer: Offer) -> None:
        """No more pages can be had: the offer is worth what is there. Worth nothing, it stays until reported."""
        offer.limit = min(offer.limit, len(offer.aside) + self.lent(offer))

    def reclaim(self, offer_id: str, keep: int, deadline_ms: int, now_ms: int) -> None:
        """From now on the offer is worth `keep` pages, and by deadline_ms its loans fit; the newest give back first.

        The smallest `keep` counts, and each deadline for its own. Of an offer that was taken back nothing is left to
        do. Raises: LoanRefused when nobody knows the offer.
        """
        if offer_id in self._closed:
            return
        offer = self.offers.get(offer_id)
        if offer is None:
            raise LoanRefused("offer.unknown", f"no offer {offer_id}")
        offer.limit = min(offer.limit, max(0, keep))
        left, shares = offer.limit, []
        for loan in sorted((x for x in self.loans.values() if x.offer is offer), key=lambda x: x.token):
            shares.append((loan, min(loan.keep, left)))
            left -= shares[-1][1]
        over = max(0, keep - offer.limit + left)  # other orders want these, by their own times
        for loan, share in shares:
            part = min(over, loan.num_pages - share)
            over -= part
            if share + part < loan.num_pages:
                self._end(loan, LoanEvent.RECLAIM, share + part, deadline_ms, now_ms)
        self._give_back(offer)
        self._forget(offer)

    def forget_idle(self, asked: Container[str]) -> None:
        """Offers that are worth nothing are over, once the coordinator was told so and does not ask for them still.

        An answer may be older than the offer: the coordinator would wait for one that is refused from then on.
        """
        for offer in [x for x in self.offers.values() if x.is_told and x.offer_id not in asked]:
            self._forget(offer)

    def _give_back(self, offer: Offer) -> None:
        """Pages that were set aside beyond its worth are free again."""
        over = len(offer.aside) + self.lent(offer) - offer.limit
        for _ in range(min(over, len(offer.aside))):
            offer.table.free(offer.aside.pop(), PageEvent.LEASE_RETURNED)
            self.counters["pages_returned"] += 1

    def _forget(self, offer: Offer) -> None:
        if not offer.limit and not offer.aside and not self.lent(offer):
            self.offers.pop(offer.offer_id, None)
            self._closed[offer.offer_id] = None
            if len(self._closed) > MAX_CLOSED:
                self._closed.popitem(last=False)

    # -- loans ------------------------------------------------------------------------------------

    def raise_fence(self, token: Token) -> None:
        """Grants below it are refused from now on. It never falls."""
        self.fence = max(self.fence, token)
        for old in [t for t in self._ended if t < self.fence]:
            del self._ended[old]

    def take(self, grant: Grant, now_ms: int) -> Loan:
        """Accept a grant, or raise LoanRefused and change nothing. One whose loan is held is answered as before."""
        if grant.boot_generation != self.boot_generation:
            raise LoanRefused("epoch.stale", "the grant was made for an earlier mempool")
        known = self.loans.get(grant.lease_id)
        if known is not None and _is_of(known, grant):
            return known
        if known is not None:
            message = f"{grant.lease_id} is held under another token or length, or by another consumer"
            raise LoanRefused("lease.stale", message)
        if grant.token < self.fence or grant.token == NO_TOKEN:
            raise LoanRefused("lease.stale", f"{grant.token} is below {self.fence}")
        if grant.token in self._ended or any(x.token == grant.token for x in self.loans.values()):
            raise LoanRefused("lease.ended", f"{grant.token} was used")
        offer = self.offers.get(grant.offer_id)
        if offer is None:
            raise LoanRefused("offer.unknown", f"no offer {grant.offer_id}")
        shelf = self.shelves.get((offer.producer, grant.space))
        if shelf is None:
            raise LoanRefused("offer.unfit", f"space {offer.producer} cannot lend to space {grant.space}")
        room = min(len(offer.aside), offer.limit - self.lent(offer))
        if not 0 < grant.num_pages <= room:
            raise LoanRefused("offer.exceeded", f"{grant.num_pages} pages of {room} that are left")
        if len(self.loans) >= MAX_LOANS or len(self._ended) >= MAX_ENDED:
            raise LoanRefused("loans.full", f"{len(self.loans)} loans are held")
        pages = [offer.aside.pop() for _ in range(grant.num_pages)]
        shelf.add(pages)
        self.counters["loans_taken"] += 1
        loan = self.loans[grant.lease_id] = Loan(
            grant.lease_id, offer, grant.consumer, grant.space, len(pages), len(pages), len(pages),
            grant.token, grant.ttl_ms, now_ms + grant.ttl_ms,
        )  # fmt: skip
        return loan

    def renew(self, lease_id: LeaseId, ttl_ms: int, now_ms: int) -> bool:
        """It ends ttl_ms from now, or what it was granted for if that is less; later if it would anyway. False: it is
        over, or on its way back."""
        self.excuse(now_ms)
        loan = self.loans.get(lease_id)
        if loan is None or not loan.keep or now_ms >= loan.expires_at_ms:
            return False
        loan.is_excused = False
        if loan.state is LoanState.HELD:
            loan.state = next_state(loan.state, LoanEvent.RENEW)
        loan.expires_at_ms = max(loan.expires_at_ms, now_ms + min(ttl_ms, loan.ttl_ms))
        return True

    def release(self, lease_id: LeaseId, now_ms: int) -> bool:
        """The consumer is done with it. False: it is over already, which is harmless."""
        loan = self.loans.get(lease_id)
        if loan is None:
            return False
        self._end(loan, LoanEvent.RELEASE, 0, now_ms + max(GRACE_MS, self.moved_in_ms(loan)), now_ms)
        return True

    def consumer_dead(self, space: int, now_ms: int) -> None:
        """No process of this space lives."""
        for loan in [x for x in self.loans.values() if x.space == space]:
            self._end(loan, LoanEvent.CONSUMER_DEAD, 0, now_ms + GRACE_MS, now_ms)

    def _end(self, loan: Loan, event: LoanEvent, keep: int, deadline_ms: int, now_ms: int) -> None:
        was_returning = loan.state is not LoanState.HELD
        loan.state = next_state(loan.state, event)
        loan.keep = min(loan.keep, keep)
        if all(keep < k or deadline_ms < at_ms for k, at_ms in loan.steps):
            others = [x for x in loan.steps if x[0] < keep or x[1] < deadline_ms]
            loan.steps = sorted([*others, (keep, deadline_ms)], reverse=True)
        self.counters[f"loans_{event}"] += not was_returning
        self._past(loan, now_ms)

    def _past(self, loan: Loan, now_ms: int) -> None:
        while len(loan.steps) > 1 and now_ms >= loan.steps[1][1]:
            del loan.steps[0]
        if loan.state is LoanState.RETURNING and now_ms >= loan.deadline_ms:
            loan.state = next_state(loan.state, LoanEvent.DEADLINE)

    def excuse(self, now_ms: int) -> None:
        """Before tick(), and before a renewal is judged: loans whose end is seen late go on for a little, once.

        This mempool stood still then: renewals may lie unread, and its own desk renewed nothing. Nobody gets their
        pages meanwhile; deadlines stay.
        """
        for loan in self.loans.values():
            if loan.keep and not loan.is_excused and now_ms - loan.expires_at_ms >= LATE_MS:
                loan.is_excused, loan.expires_at_ms = True, now_ms + EXCUSED_MS
                self.counters["loans_excused"] += 1

    def tick(self, now_ms: int) -> None:
        """What is due: loans lapse, deadlines pass."""
        for loan in list(self.loans.values()):
            if now_ms >= loan.expires_at_ms and self._can_lapse(loan):
                loan.has_lapsed = True
                deadline_ms = max(loan.expires_at_ms + GRACE_MS, now_ms + self.moved_in_ms(loan))
                self._end(loan, LoanEvent.LAPSE, 0, deadline_ms, now_ms)
            self._past(loan, now_ms)

    def _can_lapse(self, loan: Loan) -> bool:
        """Whether the end of its time may bring its pages back sooner."""
        return not loan.has_lapsed and (loan.keep > 0 or loan.steps[-1][1] > loan.expires_at_ms + GRACE_MS)

    def next_deadline_ms(self) -> int | None:
        """When tick() has something to do."""
        due = [x.expires_at_ms for x in self.loans.values() if self._can_lapse(x)]
        due += [t for x in self.loans.values() for _, t in x.steps[x.state is LoanState.DROPPING :]]
        return min(due, default=None)

    # -- pages on their way back ------------------------------------------------------------------

    def on_shelf(self, shelf: Shelf) -> list[Loan]:
        """Loans whose pages are there."""
        key = shelf.producer, shelf.consumer
        return [x for x in self.loans.values() if (x.offer.producer, x.space) == key]

    def wanted_back(self, shelf: Shelf, *, dropping: bool = False) -> int:
        """Pages that are to leave this shelf; those past their deadline only, if `dropping`."""
        return sum(
            x.num_pages - x.steps[0 if dropping else -1][0]
            for x in self.on_shelf(shelf)
            if x.state is LoanState.DROPPING or (x.state is LoanState.RETURNING and not dropping)
        )

    def collect(self, shelf: Shelf) -> int:
        """Take back what is wanted and holds nothing; loans whose pages are all back end. How many pages."""
        wanted = self.wanted_back(shelf)
        back = shelf.take_free(wanted) if wanted else []
        left = list(back)
        mine = self.on_shelf(shelf)
        steps = ((at_ms, loan.token, keep, loan) for loan in mine for keep, at_ms in loan.steps)
        for _, _, keep, loan in sorted(steps, key=lambda x: x[:3]):
            pages = [left.pop() for _ in range(min(len(left), loan.num_pages - keep))]
            loan.num_pages -= len(pages)
            self.set_aside(loan.offer, pages)
        for loan in mine:
            self._came_back(loan)
        return len(back)

    def _came_back(self, loan: Loan) -> None:
        """Some of it, perhaps."""
        left = [step for step in loan.steps if step[0] < loan.num_pages]
        if len(left) == len(loan.steps):
            return
        loan.steps = left
        whole = LoanEvent.SHRUNK if loan.keep else LoanEvent.RETURNED
        loan.state = next_state(loan.state, LoanEvent.MET if left else whole)
        if loan.state is LoanState.ENDED:
            del self.loans[loan.lease_id]
            if loan.token >= self.fence:
                self._ended[loan.token] = loan.lease_id
            self._forget(loan.offer)


def _is_of(loan: Loan, grant: Grant) -> bool:
    """Whether the loan is this grant's. A consumer that came back in another space has none of the pages."""
    return (loan.token, loan.asked, loan.consumer, loan.space) == (
        grant.token,
        grant.num_pages,
        grant.consumer,
        grant.space,
    )
