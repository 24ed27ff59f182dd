"""Tensors in lent pages and host memory while lenders come, reclaim, and copies end late or fail: never a wrong byte.

The mempool's core and the library's own book of pages (shared/aqua/pages.py), with the moments of everything chosen at
random: calls are under way while pages are reclaimed, copies end in any order, some fail, some write on after failing.
"""

from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.aqua.pages import Directory, Pages
from shared.ids import PageId
from shared.wire import mempool_api as wire
from shared.wire.mempool_api import PageAddress
from tests.support.examples import examples
from tests.unit.test_mempool_leased import HAND, Hands

picks = st.integers(0, 7)


@dataclass
class Tensor:
    """`value`: what each of its pages holds; None when a write failed half way."""

    away: Pages
    value: list[str] | None = None
    call_id: int = 0  # under way
    scratch: list[PageAddress] | None = None  # where it is read to or written from
    new: list[str] | None = None  # being written


class MovesModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.hands = Hands(dram_pages=64, producer_quota=0)
        self.book = Directory()
        self.tensors: list[Tensor] = []
        self.offers: list[str] = []
        self.in_doubt: list[tuple[int, list[PageId], list[str]]] = []
        self.num_heard = self.num_names = 0

    def hear(self) -> None:
        told = self.hands.evacuated()
        for message in told[self.num_heard :]:
            self.book.hear(message)
        self.num_heard = len(told)

    def pick(self, number: int, *, busy: bool) -> Tensor | None:
        found = [t for t in self.tensors if bool(t.call_id) == busy and not t.away.is_lost]
        return found[number % len(found)] if found else None

    # -- the consumer -----------------------------------------------------------------------------

    @precondition(lambda self: len(self.tensors) < 4)
    @rule(count=st.integers(1, 3))
    def make(self, count: int) -> None:
        found = self.hands.alloc(count, "leased")
        if isinstance(found, str):
            tensor = Tensor(Pages(None, self.hands.alloc(count, "dram")))
        else:
            tensor = Tensor(Pages(found[:count], found[count:]))
        self.book.add(tensor.away)
        self.tensors.append(tensor)
        self.write(len(self.tensors) - 1)

    @rule(number=picks)
    def write(self, number: int) -> None:
        tensor = self.pick(number, busy=False)
        if tensor is None:
            return
        self.hear()
        if tensor.away.is_lost:
            return
        count = len(tensor.away.beside)
        tensor.scratch = self.hands.alloc(count, "dram")
        self.num_names += 1
        tensor.new = [f"{self.num_names}-{i}" for i in range(count)]
        for address, name in zip(tensor.scratch, tensor.new, strict=True):
            self.hands.bytes[int(address.space), address.page] = name
        self.start(tensor, tensor.scratch, tensor.away.current())

    @rule(number=picks)
    def read(self, number: int) -> None:
        tensor = self.pick(number, busy=False)
        if tensor is None:
            return
        self.hear()
        if tensor.away.is_lost:
            return
        tensor.scratch = self.hands.alloc(len(tensor.away.beside), "dram")
        self.start(tensor, tensor.away.current(), tensor.scratch)

    def start(self, tensor: Tensor, sources: list, targets: list) -> None:
        answer = self.hands.move(sources, targets)
        if isinstance(answer, int):
            tensor.call_id = answer
        else:  # refused: a reclaim has the pages just now; said again later
            assert answer.code in ("invalid_request", "epoch.stale", "address.not_held"), answer
            self.done(tensor)

    def done(self, tensor: Tensor) -> None:
        self.hands.free(tensor.scratch)
        tensor.call_id, tensor.scratch, tensor.new = 0, None, None

    def answers(self) -> None:
        for tensor in [t for t in self.tensors if t.call_id]:
            got = [m for m in self.hands.replies[HAND] if getattr(m, "call_id", 0) == tensor.call_id]
            if not got:
                continue
            if isinstance(got[0], wire.ApiFailed):
                if tensor.new is not None and got[0].code != "epoch.stale":
                    tensor.value = None
            elif tensor.new is not None:
                tensor.value = tensor.new
            elif tensor.value is not None:
                assert [self.hands.byte(address) for address in tensor.scratch] == tensor.value
            self.done(tensor)

    @rule(number=picks)
    def drop(self, number: int) -> None:
        tensor = self.pick(number, busy=False)
        if tensor is not None:
            self.hear()
            self.book.remove(tensor.away)
            self.tensors.remove(tensor)
            self.hands.free(tensor.away.all())

    # -- the lender -------------------------------------------------------------------------------

    @precondition(lambda self: len(self.offers) < 24)
    @rule(count=st.integers(1, 4), ttl_ms=st.sampled_from([50, 100_000, 100_000]))
    def lend(self, count: int, ttl_ms: int) -> None:
        name = f"o{len(self.offers)}"
        self.offers.append(name)
        self.hands.offer(count, name)
        offer = self.hands.core.lending.loans.offers.get(name)
        if offer is not None and offer.aside:
            self.hands.present(self.hands.grant(len(offer.aside), offer=name, ttl_ms=ttl_ms))

    @precondition(lambda self: self.offers)
    @rule(number=picks, keep=st.integers(0, 2), deadline_ms=st.sampled_from([0, 10, 10_000]))
    def reclaim(self, number: int, keep: int, deadline_ms: int) -> None:
        self.hands.reclaim(keep, deadline_ms, self.offers[number % len(self.offers)])

    @precondition(lambda self: len(self.tensors) < 4)
    @rule(count=st.integers(1, 3), then=st.sampled_from(["", "read", "write"]), reclaim=st.booleans())
    def make_on_a_peer(self, count: int, then: str, reclaim: bool) -> None:
        """As a rule, and perhaps wanted back in the middle of a call."""
        if len(self.offers) < 24:
            self.lend(count, 100_000)
        self.make(count)
        self.all_copies_end_well()
        if then:
            getattr(self, then)(len(self.tensors) - 1)
        if reclaim:
            self.reclaim(len(self.offers) - 1, 0, 10)

    @precondition(lambda self: self.offers)
    @rule(deadline_ms=st.sampled_from([0, 10_000]))
    def reclaim_everything(self, deadline_ms: int) -> None:
        for number in range(len(self.offers)):
            self.reclaim(number, 0, deadline_ms)

    # -- the world --------------------------------------------------------------------------------

    @precondition(lambda self: self.hands.copies)
    @rule(number=picks, fails=st.sampled_from([False, False, False, True]), doubt=st.booleans())
    def end_copy(self, number: int, fails: bool, doubt: bool) -> None:
        copy_id = list(self.hands.copies)[number % len(self.hands.copies)]
        copy = self.hands.copies.pop(copy_id)
        read = [self.hands.bytes.get(source, "") for source in copy.sources]
        in_doubt = copy.targets if fails and doubt else []
        if in_doubt:
            self.in_doubt.append((copy.space, in_doubt, read))
        elif not fails:
            self.land(copy.space, copy.targets, read)
        self.hands.run(
            self.hands.core.on_copied(
                copy_id, self.hands.now_ms, failed=fails, in_doubt=[int(p) for p in in_doubt]
            )
        )
        self.answers()

    @rule()
    def all_copies_end_well(self) -> None:
        while self.hands.copies:
            self.end_copy(0, False, False)

    def land(self, number: int, pages: list[PageId], read: list[str]) -> None:
        self.hands.bytes.update({(number, page): name for page, name in zip(pages, read, strict=True)})

    @precondition(lambda self: self.in_doubt)
    @rule()
    def settle(self) -> None:
        number, pages, read = self.in_doubt.pop(0)
        self.land(number, pages, read)  # as late as can be
        self.hands.run(self.hands.core.on_settled(number, pages, self.hands.now_ms))

    @rule(ms=st.sampled_from([1, 40, 700]))
    def wait(self, ms: int) -> None:
        self.hands.now_ms += ms
        self.hands.run(self.hands.core.tick(self.hands.now_ms))

    # -- what must hold ---------------------------------------------------------------------------

    @invariant()
    def what_is_at_rest_is_where_the_book_says(self) -> None:
        if self.hands.copies:
            return
        self.hear()
        for tensor in self.tensors:
            if tensor.value is not None and not tensor.call_id and not tensor.away.is_lost:
                assert [self.hands.byte(address) for address in tensor.away.current()] == tensor.value

    @invariant()
    def no_reclaim_waits_for_a_consumer(self) -> None:
        if not self.hands.copies and not self.in_doubt:
            for loan in self.hands.core.lending.loans.loans.values():
                assert loan.keep or loan.num_pages == 0, loan

    @invariant()
    def pages_add_up(self) -> None:
        self.hands.counts()
        held = sum(len(tensor.away.all()) + len(tensor.scratch or ()) for tensor in self.tensors)
        owned = self.hands.core.api.api.holders[HAND].owned
        if self.num_heard == len(self.hands.evacuated()):
            assert sum(map(len, owned.values())) == held

    def teardown(self) -> None:
        while self.hands.copies or self.in_doubt:
            while self.hands.copies:
                self.end_copy(0, False, False)
            while self.in_doubt:
                self.settle()
        self.hear()
        for tensor in list(self.tensors):
            self.hands.free(tensor.away.all())
        for number in range(len(self.offers)):
            self.reclaim(number, 0, 0)
        assert self.hands.leased() == 0


MovesModel.TestCase.settings = settings(
    max_examples=examples(120), stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAquaMoves = MovesModel.TestCase
