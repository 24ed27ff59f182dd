"""Pages of one space on loan to another: blocks go there first, come back with their bytes, and leave in time."""

from pathlib import Path

import msgspec
import pytest

from services.mempool.core.actions import CopyPages
from services.mempool.core.loan_state import TABLE, LoanEvent, LoanState, diagram, next_state
from services.mempool.core.page_table import PageTable
from shared.errors import InvariantBroken
from shared.ids import Epoch, InstanceId, LeaseId, SpaceId
from shared.kv.page import PageState
from shared.kv.words import u32_list
from shared.wire import lending as market
from shared.wire import mempool as wire
from shared.wire import mempool_lending as calls
from tests.unit.mempool_harness import BOOT, PAGE_BYTES, chain, page_lists
from tests.unit.test_mempool_spaces import FRONT, PREFILL, Spaces, acquire, answers

LENDER, SELLER = 20, 21  # engine and client of the producer
ABCD = chain("a", "b", "c", "d")
WXYZ = chain("w", "x", "y", "z")


class Market(Spaces):
    """A consumer at cpu:0 with host memory behind it, a producer at cpu:1."""

    def __init__(self, *, dram_pages: int = 8, producer_quota: int = 8, **limits: object) -> None:
        options = {"dram_bytes": dram_pages * PAGE_BYTES, "dram_for_host": True} | limits
        super().__init__(8, **options)
        self.worker(PREFILL, "cpu:0", quota=8)
        self.client(FRONT, f"i{PREFILL}")
        self.worker(LENDER, "cpu:1", quota=producer_quota)
        self.client(SELLER, f"i{LENDER}")
        self.producer = self.core.space_of(InstanceId(f"i{LENDER}"))
        self.tokens, self.seller = 0, SELLER

    def offer(self, num_pages: int, name: str = "o1", boot: Epoch = BOOT) -> None:
        lender = InstanceId(f"i{LENDER}")
        offer = market.Offer(
            offer_id=name, producer=lender, producer_epoch=Epoch(1), mempool=InstanceId("m"),
            boot_generation=boot, space=SpaceId(self.producer), length_bytes=num_pages * PAGE_BYTES,
        )  # fmt: skip
        self.say(self.seller, calls.PresentOffer(call_id=1, offer=offer))
        asked = [m for m in self.sent[LENDER] if isinstance(m, wire.Shrink)]
        if asked:
            self.give_back(LENDER, self.take(LENDER, asked[-1].count))

    def grant(
        self, num_pages: int, *, lease: str = "", offer: str = "o1", ttl_ms: int = 10_000
    ) -> market.Grant:
        self.tokens += 1
        return market.Grant(
            lease_id=LeaseId(lease or f"l{self.tokens}"), offer_id=offer, consumer=InstanceId(f"i{PREFILL}"),
            purpose="overflow", mempool=InstanceId("m"), address="", boot_generation=BOOT,
            space=SpaceId(self.producer), length_bytes=num_pages * PAGE_BYTES,
            token=market.Token(1, self.tokens), present_ms=1000, ttl_ms=ttl_ms, consumer_ttl_ms=ttl_ms // 2,
        )  # fmt: skip

    def present(self, grant: market.Grant) -> calls.LendingDone | wire.CallFailed:
        self.say(FRONT, calls.PresentGrant(call_id=2, grant=grant))
        return [m for m in self.sent[FRONT] if isinstance(m, calls.LendingDone | wire.CallFailed)][-1]

    def lend(self, num_pages: int) -> market.Grant:
        self.offer(num_pages)
        grant = self.grant(num_pages)
        assert self.present(grant) == calls.LendingDone(call_id=2, num_bytes=num_pages * PAGE_BYTES)
        return grant

    def reclaim(self, keep: int, deadline_ms: int, offer: str = "o1") -> None:
        order = market.ReclaimOrder(
            reclaim_id="r", offer_id=offer, keep_bytes=keep * PAGE_BYTES, deadline_ms=deadline_ms
        )
        self.say(SELLER, calls.PresentReclaim(call_id=3, order=order))

    def leave(self, hashes: list, names: str) -> None:
        """The consumer computes a prompt and uses it no more."""
        pages = self.fill(PREFILL, 0, hashes, names)
        self.say(PREFILL, wire.Unpin(**page_lists(pages)))

    def read(self, hashes: list) -> str:
        """What a reader at the consumer gets, copies included."""
        acquire(self, hashes)
        for _ in range(8):
            if answers(self, FRONT, wire.Acquired):
                break
            asked = [m for m in self.sent[PREFILL] if isinstance(m, wire.Shrink)]
            stock = self.granted[PREFILL]
            if asked and stock:
                self.give_back(PREFILL, self.take(PREFILL, min(len(stock), asked[-1].count)))
            self.copied()
        got = answers(self, FRONT, wire.Acquired)[-1]
        self.say(FRONT, wire.Release(lease_id=got.lease_id))
        self.sent[FRONT].clear()
        return "".join(self.bytes[0, page] for page in u32_list(got.pages))

    def refused(self, grant: market.Grant) -> str:
        """The code."""
        failed = self.present(grant)
        assert isinstance(failed, wire.CallFailed)
        return failed.code

    def table(self) -> PageTable:
        memory = self.core.pools[self.producer].memory
        assert memory is not None
        return memory.table

    def leased(self) -> int:
        return self.table().counts[PageState.LEASED]

    def on_shelf(self) -> list:
        found = [pool for pool in self.core.pools.values() if pool.memory and pool.memory.is_loan]
        return [entry for pool in found for entry in pool.index.entries()]

    def counters(self) -> dict[str, int]:
        self.counts()
        return self.core.status().counters


def lent() -> tuple[Market, market.Grant]:
    """Four pages, with ABCD."""
    rig = Market()
    grant = rig.lend(4)
    rig.leave(ABCD, "abcd")
    rig.copied()
    return rig, grant


def test_what_leaves_goes_to_lent_pages_first_and_to_host_memory_after():
    rig = Market()
    rig.lend(3)
    assert rig.leased() == 3
    rig.leave(ABCD, "abcd")
    targets = [copy.space for copy in rig.copies.values() for _ in copy.targets]
    assert targets.count(rig.producer) == 3
    rig.copied()
    assert rig.counters()["peer_blocks_out"] == 3
    assert rig.counters()["dram_blocks_out"] == 4


def test_a_reader_gets_its_bytes_back_from_a_lent_page():
    rig, _ = lent()
    rig.leave(WXYZ, "wxyz")
    assert len(rig.on_shelf()) == 4
    assert rig.read(ABCD) == "abcd"
    assert rig.counters()["blocks_pulled_from_peer"] == 4
    assert not rig.counters().get("blocks_pulled_from_dram")


def test_a_reclaim_moves_blocks_to_host_memory_and_returns_the_pages_to_the_producers_engine():
    rig, _ = lent()
    before = len(rig.granted[LENDER])
    rig.reclaim(0, 1000)
    (copy,) = rig.copies.values()
    assert {space for space, _ in copy.sources} == {rig.producer}
    assert rig.leased() == 4, "they are read still"
    rig.copied()
    assert rig.leased() == 0
    assert len(rig.granted[LENDER]) == before + 4
    assert rig.read(ABCD) == "abcd"
    assert rig.counters()["blocks_pulled_from_dram"] == 4
    assert not rig.counters().get("lending_blocks_dropped")


def test_at_the_deadline_blocks_are_forgotten_but_what_a_copy_reads_is_waited_for():
    rig, _ = lent()
    rig.reclaim(0, 1000)
    rig.advance(1001)
    assert rig.leased() == 4
    rig.copied()
    assert rig.leased() == 0


def test_without_room_in_host_memory_a_reclaim_drops_what_is_left_at_its_deadline():
    rig = Market(dram_pages=1)
    rig.lend(4)
    rig.leave(ABCD, "abcd")
    rig.copied()
    rig.reclaim(0, 1000)
    rig.copied(failed=True)
    assert rig.leased() == 4, "nothing could leave"
    rig.advance(1000)
    assert rig.leased() == 0
    assert rig.counters()["lending_blocks_dropped"] == 4


def test_a_reclaim_of_a_part_leaves_the_rest_on_loan():
    rig, _ = lent()
    rig.reclaim(3, 1000)
    rig.copied()
    assert rig.leased() == 3
    assert len(rig.on_shelf()) == 3
    assert rig.read(ABCD) == "abcd"


def test_no_block_goes_to_a_loan_that_is_being_reclaimed():
    rig = Market()
    rig.lend(4)
    rig.leave(ABCD[:1], "a")
    rig.copied()
    rig.reclaim(0, 1000)
    rig.leave(WXYZ, "wxyz")
    assert all(copy.space != rig.producer for copy in rig.copies.values())


@pytest.mark.parametrize("ttl_ms", [10_000, 3_600_000])
def test_a_loan_whose_time_is_over_returns_its_pages_to_the_offer_and_a_renewed_one_has_it_again(ttl_ms):
    rig = Market()
    grant = rig.lend(4)
    rig.advance(9_999)
    rig.say(FRONT, calls.RenewLoan(call_id=9, lease_id=grant.lease_id, ttl_ms=ttl_ms))
    rig.advance(9_999)
    assert grant.lease_id in rig.core.lending.loans.loans
    rig.advance(2)
    assert grant.lease_id not in rig.core.lending.loans.loans
    assert rig.leased() == 4, "still set aside"
    assert isinstance(rig.present(rig.grant(4)), calls.LendingDone)


def test_a_renewed_loan_says_how_much_of_it_stays_while_a_part_is_wanted_back():
    rig, grant = lent()
    for keep in (4, 3, 3):
        if keep < 4:
            rig.reclaim(3, 1_000)
        rig.say(FRONT, calls.RenewLoan(call_id=9, lease_id=grant.lease_id, ttl_ms=10_000))
        assert answers(rig, FRONT, calls.LendingDone)[-1].num_bytes == keep * PAGE_BYTES
    assert rig.leased() == 4, "the copy of what lies there has not ended"
    rig.reclaim(0, 1_000)
    rig.say(FRONT, calls.RenewLoan(call_id=10, lease_id=grant.lease_id, ttl_ms=10_000))
    assert answers(rig, FRONT, wire.CallFailed)[-1].code == "lease.ended"


def test_a_released_loan_empties_into_host_memory():
    rig, grant = lent()
    rig.say(FRONT, calls.ReleaseLoan(call_id=9, lease_id=grant.lease_id))
    rig.copied()
    assert not rig.core.lending.loans.loans
    assert rig.read(ABCD) == "abcd"


def test_a_consumer_whose_processes_are_dead_returns_everything():
    rig, _ = lent()
    for connection in (PREFILL, 100 + PREFILL):
        rig.run(rig.core.on_closed(connection, rig.now_ms))
    assert rig.core.lending.loans.loans, "its processes may live"
    rig.run(rig.core.on_process_dead(PREFILL, rig.now_ms))
    rig.copied()
    assert not rig.core.lending.loans.loans


def test_a_dead_producer_does_not_cost_the_consumer_its_blocks():
    rig, _ = lent()
    for connection in (LENDER, 100 + LENDER):
        rig.run(rig.core.on_closed(connection, rig.now_ms))
    rig.run(rig.core.on_process_dead(LENDER, rig.now_ms))
    assert rig.read(ABCD) == "abcd"
    assert rig.counters()["blocks_pulled_from_peer"] == 4


def test_an_offer_is_worth_what_engines_give_back_in_time():
    rig = Market()
    rig.fill(LENDER, rig.producer, ABCD, "abcd")  # pinned: 4 pages are left
    rig.granted[LENDER], kept = rig.granted[LENDER][:2], rig.granted[LENDER][2:]
    rig.say(
        SELLER,
        calls.PresentOffer(
            call_id=1,
            offer=market.Offer(
                offer_id="o1", producer=InstanceId(f"i{LENDER}"), producer_epoch=Epoch(1),
                mempool=InstanceId("m"), boot_generation=BOOT, space=SpaceId(rig.producer),
                length_bytes=4 * PAGE_BYTES,
            ),
        ),
    )  # fmt: skip
    rig.give_back(LENDER, rig.take(LENDER, 2))
    assert rig.refused(rig.grant(4)) == "offer.exceeded"
    rig.advance(2_000)
    assert rig.core.lending.loans.offers["o1"].limit == 2
    rig.give_back(LENDER, kept)
    assert len(rig.granted[LENDER]) == 2, "they are the engine's again"
    assert isinstance(rig.present(rig.grant(2)), calls.LendingDone)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"boot_generation": Epoch(BOOT - 1)}, "epoch.stale"),
        ({"offer_id": "o2"}, "offer.unknown"),
        ({"length_bytes": 5 * PAGE_BYTES}, "offer.exceeded"),
        ({"length_bytes": PAGE_BYTES - 1}, "offer.exceeded"),
        ({"consumer": InstanceId("nobody")}, "consumer.unknown"),
        ({"consumer": InstanceId(f"i{LENDER}")}, "offer.unfit"),
        ({"token": market.Token(0, 9)}, "lease.stale"),
        ({"token": market.Token(1 << 60, 9)}, "invalid_request"),
        ({"lease_id": LeaseId("a b")}, "invalid_request"),
    ],
)
def test_a_grant_that_does_not_fit_is_refused_and_changes_nothing(change, code):
    rig = Market()
    rig.offer(4)
    rig.core.lending.loans.raise_fence(market.Token(1, 0))
    bad = msgspec.structs.replace(rig.grant(4), **change)
    assert rig.refused(bad) == code
    assert not rig.core.lending.loans.loans
    assert isinstance(rig.present(rig.grant(4)), calls.LendingDone)


def test_a_grant_is_good_once_and_said_again_it_is_answered_as_before():
    rig = Market()
    grant = rig.lend(2)
    assert rig.present(grant) == calls.LendingDone(call_id=2, num_bytes=2 * PAGE_BYTES)
    assert rig.leased() == 2
    rig.say(FRONT, calls.ReleaseLoan(call_id=9, lease_id=grant.lease_id))
    assert rig.refused(grant) == "lease.ended"


def test_a_grant_said_again_for_another_consumer_is_not_that_ones_loan():
    rig = Market()
    rig.worker(33, "cpu:2", quota=4)
    other = msgspec.structs.replace(rig.lend(2), consumer=InstanceId("i33"))
    assert rig.refused(other) == "lease.stale"


def test_lent_pages_are_in_no_total_twice_and_show_as_a_space_of_their_own():
    rig = Market()
    before = rig.core.status().num_pages
    rig.lend(4)
    status = rig.core.status()
    assert status.num_pages == before
    assert status.pages_by_state["leased"] == 4
    (shelf,) = [space for space in status.spaces if space.devices == ["cpu:loan"]]
    assert (shelf.num_pages, shelf.num_indexed) == (4, 0)


def test_a_failed_copy_into_a_lent_page_keeps_it_until_nothing_can_write_there():
    rig = Market()
    rig.lend(1)
    rig.leave(ABCD[:1], "a")
    (copy,) = [c for c in rig.copies.values() if isinstance(c, CopyPages)]
    assert copy.space == rig.producer
    rig.copied(failed=True, in_doubt=copy.targets)
    rig.reclaim(0, 0)
    rig.advance(60_000)
    assert rig.leased() == 1
    rig.run(rig.core.on_settled(rig.producer, copy.targets, rig.now_ms))
    assert rig.leased() == 0


def test_lent_pages_are_told_of_as_one_copy_away_from_the_consumer_alone():
    rig = Market()
    rig.lend(1)
    audience = rig.core.audience.now(rig.now_ms)
    (number,) = [n for n, pool in rig.core.pools.items() if pool.memory and pool.memory.is_loan]
    assert audience[number].media == {InstanceId(f"i{PREFILL}"): "dram"}
    assert not audience[number].is_dram


def test_a_page_that_is_lent_is_not_given_back_to_the_system_nor_counted_for_engines():
    rig = Market()
    rig.lend(4)
    assert rig.table().num_present == 4
    rig.say(SELLER, wire.ReleaseMemory(call_id=7, num_bytes=8 * PAGE_BYTES))
    assert rig.leased() == 4


@pytest.mark.parametrize("state", LoanState)
@pytest.mark.parametrize("event", LoanEvent)
def test_every_pair_of_a_loans_life_follows_the_table_or_is_our_bug(state, event):
    legal = {(row.state, row.event): row.target for row in TABLE}
    if (state, event) in legal:
        assert next_state(state, event) is legal[state, event]
    else:
        with pytest.raises(InvariantBroken):
            next_state(state, event)


def test_the_document_shows_the_table_of_loans():
    assert diagram() in (Path(__file__).parents[2] / "docs" / "mempool.md").read_text()
