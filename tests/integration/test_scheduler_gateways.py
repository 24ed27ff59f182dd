"""The scheduler's shell: a gateway's connection that ends, for good and for a moment."""

import pytest

from services.scheduler import shell
from services.scheduler.core import gateways
from shared.transport.zmq_channel import DealerLink
from shared.wire.placement import FROM_SCHEDULER, TO_SCHEDULER, Ended, GatewayHello
from shared.wire.reports import REPORT_REPLIES, REPORTS
from tests.support.control_plane import hello, place, until
from tests.support.lone_scheduler import scheduler_of_one


@pytest.fixture
async def scheduler(tmp_path, monkeypatch):
    monkeypatch.setattr(gateways, "GRACE_MS", 1_500)
    async with scheduler_of_one(tmp_path) as made:
        yield made


async def gateway(scheduler, name, **more):
    link = DealerLink(
        scheduler.addresses[0], out=TO_SCHEDULER, into=FROM_SCHEDULER, on_message=lambda *_: None
    )
    await link.connect()
    link.send(GatewayHello(gateway=name, **more))
    return link


async def test_what_was_placed_for_a_killed_gateway_is_forgotten_and_for_one_that_came_back_is_not(scheduler):
    dead, moved = await gateway(scheduler, "dead"), await gateway(scheduler, "moved")
    for number in range(3):
        dead.send(place(f"dead-{number}", tenant="dead"))
        moved.send(place(f"moved-{number}", tenant="moved"))
    await until(lambda: scheduler.placer.num_open == 6)
    dead.close()
    moved.close()
    again = await gateway(scheduler, "moved")
    await until(lambda: scheduler.placer.num_open == 3)
    assert scheduler.status()["places"] == {"moved": {"c0": 3}}
    again.send(Ended(request_id="dead-0", attempt=1))  # one of the forgotten
    for number in range(3):
        again.send(Ended(request_id=f"moved-{number}", attempt=1))
    await until(lambda: scheduler.placer.num_open == 0)
    again.close()


async def test_a_gateway_says_how_long_its_requests_may_run(scheduler):
    link = await gateway(scheduler, "patient", request_deadline_ms=7_200_000)
    await until(lambda: scheduler.placer._open.forget_ms == 7_500_000)
    assert [known.load.forget_ms for known in scheduler.instances] == [7_500_000]
    link.close()


async def test_whose_malformed_message_was_dropped_and_why_is_said(scheduler, monkeypatch):
    """A worker of another version became ready, was never placed on, and nobody said why."""
    said = []
    monkeypatch.setattr(shell._log, "warning", lambda event, **ids: said.append((event, ids)))
    named = await gateway(scheduler, "named")
    await until(lambda: scheduler.gateways._names)
    worker = DealerLink(scheduler.addresses[1], out=REPORTS, into=REPORT_REPLIES, on_message=lambda *_: None)
    await worker.connect()
    worker.send(hello("c1", role="colocated"))
    await until(lambda: any(known.instance == "c1" for known in scheduler.instances))
    for link in (named, worker, worker):
        link._peer.send([link._out.schema, bytes(8), b"\xc0"])
    stranger = DealerLink(
        scheduler.addresses[1], out=REPORTS, into=REPORT_REPLIES, on_message=lambda *_: None
    )
    await stranger.connect()
    stranger._peer.send([b"reports/0", bytes(8), b"\xc0"])
    await until(lambda: len(said) == 3)
    assert {event for event, _ in said} == {"malformed_message"}
    senders = {ids["sender"]: ids["error"] for _, ids in said}
    assert senders.keys() == {"gateway named", "worker c1", "a worker at a unix socket"}
    assert "reports/0" in senders["a worker at a unix socket"]
    await until(lambda: scheduler._reports.num_malformed == 3)
    for link in (named, worker, stranger):
        link.close()


async def test_a_gateway_that_ended_in_order_is_no_warning(scheduler, monkeypatch):
    said = []
    monkeypatch.setattr(shell._log, "warning", lambda event, **ids: said.append((event, ids)))
    orderly, killed = await gateway(scheduler, "orderly"), await gateway(scheduler, "killed")
    orderly.send(place("a"))
    orderly.send(Ended(request_id="a", attempt=1))
    killed.send(place("b"))
    await until(lambda: scheduler.placer.num_placed == 2 and scheduler.placer.num_open == 1)
    orderly.close()
    await until(lambda: not scheduler.gateways._lost and len(scheduler.gateways._names) == 1)
    assert said == []
    killed.close()
    await until(lambda: said)
    assert said == [("ends_untold", {"gateways": ["killed"], "num_forgotten": 1})]
