"""The coordinator without its HTTP: what the life of a member means for what it lends; what it reads of its journal."""

from itertools import count

import msgspec
import pytest

from services.coordinator.config import CoordinatorSettings
from services.coordinator.core.membership import JournalEntry
from services.coordinator.journal import _entries
from services.coordinator.market_journal import _ENTRIES, _decoded
from services.coordinator.shell import Coordinator
from shared.ids import InstanceId
from shared.transport.clock import ManualClock
from shared.wire.lending import AskLease, Grant, OfferMemory, ReportReply, SpaceRef
from shared.wire.membership import Heartbeat, HeartbeatReply, Registered
from tests.support.control_plane import register
from tests.support.market_world import GIB, SPACE, ModelMempool

P0 = InstanceId("p0")
AN_HOUR_MS = 3_600_000


class Rig:
    """A coordinator whose time is told, a mempool, and p0, which has offered memory there that is lent from."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.coordinator = Coordinator(CoordinatorSettings(redis_url=""), self.clock)
        self.market = self.coordinator.lending.market
        self.mempool = ModelMempool("m0", count(1))
        self.begin_term(10)
        registered = self.coordinator.register(register(P0))
        assert isinstance(registered, Registered)
        self.epoch = registered.epoch
        self.pass_ms(500)
        self.market.offer(
            OfferMemory(
                producer=P0, producer_epoch=self.epoch, mempool=self.mempool.name,
                boot_generation=self.mempool.boot, space=SPACE, length_bytes=4 * GIB,
            ),
            "",
            now_ms=self.clock.now_ms(),
        )  # fmt: skip
        self.pass_ms(500)
        self.beat()
        assert self.is_lent_from()

    def begin_term(self, term: int) -> None:
        self.coordinator.lending._begin_term(term, 1 << 60, knows_all=True)

    def beat(self) -> None:
        assert isinstance(self.coordinator.heartbeat(P0, Heartbeat(epoch=self.epoch)), HeartbeatReply)

    def pass_ms(self, ms: int) -> None:
        for _ in range(ms // 250):
            self.clock.advance(250)
            now_ms = self.clock.now_ms()
            self.coordinator._watch_members(0)
            self.market.tick(now_ms=now_ms)
            reply = self.market.report(self.mempool.name, self.mempool.report(now_ms), now_ms=now_ms)
            if isinstance(reply, ReportReply):
                self.mempool.hear(reply, now_ms)

    def is_lent_from(self) -> bool:
        spaces = [SpaceRef(mempool=self.mempool.name, space=SPACE)]
        ask = AskLease(consumer=InstanceId("c0"), length_bytes=GIB, purpose="swap", spaces=spaces)
        return isinstance(self.market.lease(ask, "", now_ms=self.clock.now_ms()), Grant)


def test_nothing_is_taken_back_from_who_was_silent_here_while_another_coordinator_led():
    rig = Rig()
    rig.clock.advance(AN_HOUR_MS)  # it stands by: its members are as they were
    rig.begin_term(11)
    rig.pass_ms(1_250)
    assert [view.state for view in rig.coordinator.listing().instances] == ["suspect"]
    rig.beat()
    rig.pass_ms(500)
    assert not rig.market.book.reclaims
    assert rig.is_lent_from()


def test_a_producer_that_left_in_order_is_not_lent_from():
    rig = Rig()
    assert rig.coordinator.remove(P0, rig.epoch) is None
    rig.pass_ms(500)
    assert not rig.is_lent_from()


def test_a_producer_that_was_forgotten_while_nothing_could_be_taken_back_is_not_lent_from():
    rig = Rig()
    rig.market.extend(0)
    rig.pass_ms(62_000)
    assert not rig.coordinator.listing().instances
    rig.begin_term(11)
    rig.pass_ms(500)
    assert not rig.is_lent_from()


def test_a_producer_that_was_never_known_here_is_lent_from():
    rig = Rig()
    after = Coordinator(CoordinatorSettings(redis_url=""), rig.clock)
    after.lending.market = rig.coordinator.lending.market  # as its mempool tells it
    rig.coordinator = after
    rig.pass_ms(5_000)
    assert rig.is_lent_from()


def test_nobody_is_forgotten_before_the_store_has_said_who_leads():
    clock = ManualClock()
    coordinator = Coordinator(CoordinatorSettings(redis_url="redis://127.0.0.1:1/0"), clock)
    coordinator.register(register(P0))
    for _ in range(2):
        clock.advance(AN_HOUR_MS)
        coordinator._watch_members(0)
    assert coordinator.lending.role() == "unknown"
    assert [view.state for view in coordinator.listing().instances] == ["dead"]


@pytest.mark.parametrize("damaged", [b"no JSON", b"{}", b'{"instance": "\xff"}', b"[" * 2_000 + b"]" * 2_000])
def test_what_cannot_be_decoded_is_left_out_of_the_journals(damaged):
    deep = b'{"type": "nobody knows", "x": ' + damaged + b"}"
    good = JournalEntry(instance=P0, epoch=5)
    lines = [b"a", damaged, b"b", deep, b"p0", msgspec.json.encode(good)]
    assert _entries(lines) == [good]
    assert _decoded([damaged, deep], _ENTRIES) == []
