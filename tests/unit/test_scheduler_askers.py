"""Who asked for a held request is remembered until it has its answer, and no longer."""

from services.scheduler.config import SchedulerSettings
from services.scheduler.shell import Scheduler
from shared.transport.clock import ManualClock
from shared.wire.placement import Held, Placed
from shared.wire.reports import Room
from tests.support.control_plane import hello, place, report


async def test_a_held_request_that_is_asked_for_again_and_answered_at_once_is_remembered_no_more():
    """Over a new connection; nobody tells its end when the gateway dies then."""
    clock, sent = ManualClock(1_000), []
    address = "tcp://127.0.0.1:0"
    settings = SchedulerSettings(listen=address, report_listen=address, disaggregation="always")
    scheduler = Scheduler(settings, clock, "boot")
    scheduler._places.send = lambda identity, answer: sent.append((identity, type(answer)))
    for name, role in (("p0", "prefill"), ("d0", "decode")):
        scheduler.instances.hello(hello(name, role=role), now_ms=clock.now_ms())
    for seq, free in ((1, 0), (2, 100)):
        for name in ("p0", "d0"):
            room = report(name, seq=seq, room=Room(100, free, 0))
            scheduler.instances.report(room, now_ms=clock.now_ms())
        scheduler._on_place(b"g%d" % seq, 0, place("r", tokens=200), [])
        clock.advance(1)
    assert sent == [(b"g1", Held), (b"g2", Placed)]
    assert not scheduler._askers
