"""The memory market under losses: two coordinators (one may be a woken old leader), two mempools, consumers that
repeat.

At every step: what a mempool lends on an offer, plus every grant that it would still take, is no more than the
offer; a deadline never moves back; one key never brings two leases.
"""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.ids import InstanceId
from shared.wire.lending import (
    AskLease,
    AskReclaim,
    LeaseCall,
    LendingRefused,
    OfferMemory,
    OfferView,
    ReclaimOrder,
    SpaceRef,
)
from tests.support.examples import examples
from tests.support.market_world import GIB, World

NAMES = st.sampled_from(["leader", "leader", "leader", "leader", "a", "b"])
MEMPOOLS = st.sampled_from(["m0", "m1"])
TROUBLES = (
    "take over", "old leader wakes", "leader restarts", "crash", "store wiped", "all lost", "mempool restarts",
    "mempool taken over",
)  # fmt: skip
RARELY = st.sampled_from([False, False, False, True])
PICK = st.integers(0, 10**6)


class MarketModel(RuleBasedStateMachine):
    """Rules are single steps; settle() and lead_calmly() are whole exchanges, so that runs get somewhere."""

    def __init__(self):
        super().__init__()
        self.world = self.make_world()
        self.offers: list[str] = []
        self.asks: list[tuple[AskLease, str]] = []
        self.decided: set[tuple[str, int]] = set()  # leases and their bytes; those whose answer was lost, too
        self.deadlines: dict[tuple[str, int], int] = {}  # (offer, keep) -> latest instant allowed

    def make_world(self) -> World:
        return World()

    @initialize()
    def begin(self):
        self.lead_calmly("a")
        for mempool in ("m0", "m1"):
            self.offer("a", mempool, 2)
        self.world.settle("a")
        self.borrow("a", 1)

    # --- what goes wrong

    def _of(self, name):
        return (self.world.store.leader or "a") if name == "leader" else name

    @rule(name=st.sampled_from(["a", "b"]))
    def lead_calmly(self, name):
        """Take over and rebuild with a network that works."""
        self._take_over(name)
        self.world.settle(name)
        self.world.pass_ms(1_600)
        self.world.settle(name, 1)

    @rule(kind=st.sampled_from(TROUBLES), name=st.sampled_from(["a", "b"]), mempool=MEMPOOLS)
    def trouble(self, kind, name, mempool):
        world, leader = self.world, self._of("leader")
        match kind:
            case "take over":
                self._take_over(name)
            case "old leader wakes":
                if world.coordinators[name].book.term:
                    world.coordinators[name].extend(world.now_ms + 5_000)
            case "leader restarts":
                world.crash(leader)
                self._take_over(leader)
            case "crash":
                world.crash(name)
            case "store wiped":
                world.store.wipe()
            case "all lost":
                world.store.wipe()
                world.crash("a")
                world.crash("b")
            case "mempool restarts":
                world.mempools[mempool].restart(keeps=False)
            case "mempool taken over":
                world.mempools[mempool].restart(keeps=True)

    def _take_over(self, name):
        """The leader's lease lapsed, or so the store says; the old one may still believe in it."""
        self.world.store.until_ms = 0
        self.world.elect(name, lease_ms=60_000)

    # --- producers and consumers

    @precondition(lambda self: len(self.offers) < 4)
    @rule(name=NAMES, mempool=MEMPOOLS, gib=st.integers(1, 2))
    def offer(self, name, mempool, gib):
        name, found = self._of(name), self.world.mempools[mempool]
        ask = OfferMemory(
            producer=InstanceId(f"p-{mempool}"), mempool=found.name, boot_generation=found.boot, space=found.space,
            length_bytes=gib * GIB,
        )  # fmt: skip
        key = f"offer-{len(self.offers)}"
        answer = self.world.coordinators[name].offer(ask, key, now_ms=self.world.now_ms)
        if isinstance(answer, OfferView) and self.world.write(name):
            self.offers.append(answer.offer.offer_id)
            again = self.world.coordinators[name].offer(ask, key, now_ms=self.world.now_ms)
            assert again == answer

    @rule(name=NAMES, gib=st.integers(1, 2))
    def borrow(self, name, gib):
        """The whole way, twice over."""
        num_sent = len(self.world.sent)
        self.ask(name, gib, 1, False)
        for grant in self.world.sent[num_sent:] * 2:
            self.world.mempools[grant.mempool].present(grant, self.world.now_ms)

    @rule(name=NAMES, gib=st.integers(1, 2), least=st.integers(0, 1), is_lost=RARELY)
    def ask(self, name, gib, least, is_lost):
        spaces = [SpaceRef(mempool=m.name, space=m.space) for m in self.world.mempools.values()]
        ask = AskLease(
            consumer=InstanceId(f"c{gib % 2}"), length_bytes=gib * GIB, min_bytes=least * GIB, purpose="swap",
            spaces=spaces,
        )  # fmt: skip
        self.asks.append((ask, f"key-{len(self.asks)}"))
        self._answer(name, *self.asks[-1], is_lost)

    @precondition(lambda self: self.asks)
    @rule(name=NAMES, pick=PICK, is_lost=RARELY)
    def ask_again(self, name, pick, is_lost):
        ask, key = self.asks[pick % len(self.asks)]
        before = [x for x in self.world.sent if x.key == key]
        market = self.world.coordinators[self._of(name)]
        num_leases = len(market.book.leases)
        grant = self._answer(name, ask, key, is_lost)
        if grant is not None and grant in before:
            assert len(market.book.leases) == num_leases, "a repeated call did something"

    def _answer(self, name, ask, key, is_lost):
        name = self._of(name)
        market = self.world.coordinators[name]
        answer = market.lease(ask, key, now_ms=self.world.now_ms)
        if isinstance(answer, LendingRefused) or not self.world.write(name):
            return None  # not journalled: the shell refuses instead
        offer = market.book.offers[answer.offer_id]
        promise = answer.lease_id, answer.length_bytes
        if (
            promise not in self.decided
        ):  # else it is told again, perhaps as presented, whatever was reclaimed since
            assert market.book.leased_bytes(answer.offer_id) <= offer.limit_bytes
            self.decided.add(promise)
        if not is_lost:
            self.world.sent.append(answer)
        return answer

    @precondition(lambda self: self.world.sent)
    @rule(pick=PICK)
    def present(self, pick):
        grant = self.world.sent[-1 - pick % min(4, len(self.world.sent))]
        self.world.mempools[grant.mempool].present(grant, self.world.now_ms)

    @precondition(lambda self: self.world.sent)
    @rule(pick=PICK)
    def give_back_at_the_mempool(self, pick):
        grant = self.world.sent[pick % len(self.world.sent)]
        self.world.mempools[grant.mempool].give_back(grant.lease_id)

    @precondition(lambda self: self.world.sent)
    @rule(name=NAMES, pick=PICK, call=st.sampled_from(["renew", "release"]))
    def renew_or_release(self, name, pick, call):
        grant = self.world.sent[pick % len(self.world.sent)]
        words, name = LeaseCall(consumer=grant.consumer, token=grant.token), self._of(name)
        getattr(self.world.coordinators[name], call)(grant.lease_id, words, now_ms=self.world.now_ms)
        self.world.write(name)

    @precondition(lambda self: self.offers)
    @rule(name=NAMES, pick=PICK, gib=st.integers(0, 3), deadline_ms=st.integers(0, 3_000))
    def reclaim(self, name, pick, gib, deadline_ms):
        offer_id, name = self.offers[pick % len(self.offers)], self._of(name)
        market = self.world.coordinators[name]
        found = market.book.offers.get(offer_id)
        producer = found.offer.producer if found else InstanceId("p-m0")
        ask = AskReclaim(
            offer_id=offer_id, producer=producer, length_bytes=gib * GIB, deadline_ms=deadline_ms
        )
        key = f"reclaim-{self.world.now_ms}-{pick}-{gib}"
        answer = market.reclaim(ask, key, now_ms=self.world.now_ms)
        if isinstance(answer, ReclaimOrder):
            assert market.reclaim(ask, key, now_ms=self.world.now_ms) == answer
            self.world.write(name)

    # --- the network

    @rule(mempool=MEMPOOLS)
    def send_report(self, mempool):
        self.world.reports.append((mempool, self.world.mempools[mempool].report(self.world.now_ms)))

    @precondition(lambda self: self.world.reports)
    @rule(name=NAMES, pick=PICK, repeat=st.booleans())
    def deliver_report(self, name, pick, repeat):
        index, name = pick % len(self.world.reports), self._of(name)
        mempool, report = self.world.reports[index] if repeat else self.world.reports.pop(index)
        answer = self.world.coordinators[name].report(
            self.world.mempools[mempool].name, report, now_ms=self.world.now_ms
        )
        self.world.write(name)
        if not isinstance(answer, LendingRefused):
            self.world.replies.append((mempool, answer))

    @precondition(lambda self: self.world.replies)
    @rule(pick=PICK, repeat=st.booleans())
    def deliver_reply(self, pick, repeat):
        index = pick % len(self.world.replies)
        mempool, answer = self.world.replies[index] if repeat else self.world.replies.pop(index)
        self.world.mempools[mempool].hear(answer, self.world.now_ms)

    @rule(mempool=MEMPOOLS, name=NAMES)
    def exchange(self, mempool, name):
        self.world.report_to(mempool, self._of(name))

    @rule(mempool=MEMPOOLS, name=NAMES)
    def exchange_with_a_late_answer(self, mempool, name):
        self.send_report(mempool)
        self.deliver_report(name, len(self.world.reports) - 1, False)

    @rule(name=NAMES, all_lost=st.booleans())
    def lead_with_late_answers(self, name, all_lost):
        """A new leader has everybody's report, nobody has its fence, and consumers ask already."""
        if all_lost:
            self.trouble("all lost", "a", "m0")
        self._take_over(self._of(name))
        for mempool in ("m0", "m1"):
            self.exchange_with_a_late_answer(mempool, name)
        self.world.pass_ms(1_400)
        for mempool in ("m0", "m1"):
            self.exchange_with_a_late_answer(mempool, name)
        self.world.pass_ms(200)
        for _ in range(3):
            self.ask(name, 1, 1, False)

    @rule(name=NAMES)
    def settle(self, name):
        self.world.settle(self._of(name))

    @rule(duration_ms=st.sampled_from([100, 200, 500, 1_600]))
    def time_passes(self, duration_ms):
        self.world.pass_ms(duration_ms)

    # --- what must hold

    @invariant()
    def nothing_is_lent_twice(self):
        self.world.check()

    @invariant()
    def one_key_never_brings_two_grants_that_could_both_be_used(self):
        usable: dict[str, set[str]] = {}
        for grant in self.world.sent:
            mempool = self.world.mempools[grant.mempool]
            if grant.lease_id in mempool.leases or mempool.would_take(grant):
                usable.setdefault(grant.key, set()).add(grant.lease_id)
        for key, leases in usable.items():
            assert len(leases) <= 1 or self._was_silent(key), f"{key}: {leases}"

    def _was_silent(self, key):
        """A mempool that was silent for its time to live is not waited for: its grant may live beside a new one."""
        terms = {x.token.term for x in self.world.sent if x.key == key}
        return len(terms) > 1 and len({x.mempool for x in self.world.sent if x.key == key}) > 1

    @invariant()
    def deadlines_never_move_back(self):
        for mempool in self.world.mempools.values():
            for offer_id, (keep_bytes, deadline_ms) in mempool.orders.items():
                known_ms = self.deadlines.setdefault((offer_id, keep_bytes), deadline_ms)
                assert deadline_ms <= known_ms


TestMarketModel = MarketModel.TestCase
TestMarketModel.settings = settings(max_examples=examples(80), stateful_step_count=40, deadline=None)
