"""Answers that are no messages: who waits for one is not left waiting, and whose it was is said."""

import asyncio
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY

from services.gateway import scheduler_link, worker_links
from services.gateway.scheduler_link import SchedulerLink
from services.mempool import peer_links
from services.mempool.peer_background import Background
from services.mempool.peer_links import PeerLink
from shared.engine import worker_reports
from shared.engine.worker_config import WorkerSettings
from shared.engine.worker_cost import WorkerCost
from shared.engine.worker_reports import SchedulerReports
from shared.transport.zmq_channel import RouterServer
from shared.wire import mempool_peer, placement, reports
from tests.integration.gateway_app import running
from tests.integration.gateway_rig import answer_tokens, chat, colocate, disaggregate, make_model_dir, until

TEXT = "the quick brown fox"


async def speak_nonsense(worker, identity, _generate, _prompt):
    """A FakeWorker's script."""
    worker.server._peers[identity].send([b"to-gateway/0", bytes(8), b"\xc0"])


def count(name, **labels):
    return REGISTRY.get_sample_value(name, labels) or 0.0


@pytest.fixture
def said(monkeypatch):
    """Senders of malformed messages, as the log has them."""
    senders = []

    def warning(event, **ids):
        if event == "malformed_message":
            senders.append(ids["sender"])

    for log in (worker_links._log, scheduler_link._log, worker_reports._log, peer_links.log):
        monkeypatch.setattr(log, "warning", warning)
    return senders


@pytest.mark.parametrize("begun", [False, True])
async def test_a_request_whose_worker_speaks_nonsense_goes_on_at_another_one_at_once(tmp_path, said, begun):
    """It waited for all of request_deadline_ms; a stream went on with a hole."""
    async with running(make_model_dir(tmp_path)) as rig:
        before = count("quire_gateway_malformed_total", peer="worker")
        ids = rig.ids(TEXT)

        async def broken(worker, identity, generate, prompt):
            if begun:
                worker.tokens(identity, generate, ids[:2])
            await speak_nonsense(worker, identity, generate, prompt)
            worker.tokens(identity, generate, ids[3:4])  # behind the hole

        rig.scheduler.decide = colocate(rig.a, rig.b)
        rig.a.script, rig.b.script = broken, answer_tokens(ids)
        body = chat(stream=True, temperature=0, return_token_ids=True)
        async with asyncio.timeout(10):
            found = await rig.client.post("/v1/chat/completions", json=body)
            await rig.a.abort_seen.wait()  # it is there, and would go on
        assert '"error"' not in found.text
        assert "[DONE]" in found.text
        assert len(rig.b.generated) == 1
        assert rig.b.generated[0].num_output_tokens == (2 if begun else 0)
        assert said == [f"the worker at {rig.a.server.address}"]
        assert count("quire_gateway_malformed_total", peer="worker") == before + 1


async def test_a_stream_that_cannot_go_on_ends_with_the_reason(tmp_path, said):
    async with running(make_model_dir(tmp_path)) as rig:

        async def broken(worker, identity, generate, prompt):
            worker.tokens(identity, generate, rig.ids(TEXT))
            await speak_nonsense(worker, identity, generate, prompt)

        rig.scheduler.decide = colocate(rig.a, rig.b)
        rig.a.script = broken
        body = chat(stream=True, seed=7, temperature=1.0)
        async with asyncio.timeout(10):
            found = await rig.client.post("/v1/chat/completions", json=body)
        assert "peer.protocol" in found.text
        assert not rig.b.generated


async def test_nonsense_of_a_decode_worker_is_of_nobody_that_it_was_not_asked_for(tmp_path, said):
    async with running(make_model_dir(tmp_path)) as rig:
        ids = rig.ids(TEXT)

        async def slow(worker, identity, generate, prompt):
            (other,) = rig.b.server._peers
            await speak_nonsense(rig.b, other, None, None)
            await until(lambda: said)
            await answer_tokens(ids)(worker, identity, generate, prompt)

        rig.scheduler.decide = disaggregate(rig.a, rig.b)
        rig.a.script, rig.b.script = slow, answer_tokens(ids)
        found = await rig.client.post("/v1/chat/completions", json=chat())
        assert found.status_code == 200
        assert (len(rig.a.generated), len(rig.b.generated)) == (1, 1)


async def answered_with_nonsense(into, out, make):
    """`make(address)` opens a link to a server that answers each message with nonsense."""
    server = RouterServer(
        "tcp://127.0.0.1:0", into=into, out=out,
        on_message=lambda identity, *_: server._peers[identity].send([b"other/1", bytes(8), b"\xc0"]),
    )  # fmt: skip
    await server.start()
    close = make(server.address)
    return server, close


async def test_links_to_the_scheduler_and_between_mempools_say_whose_message_was_none(said, tmp_path):
    wants = []
    opened = []

    def gateway(address):
        link = SchedulerLink(address, on_message=lambda *_: None, on_down=lambda: None)
        link.open()
        return link.close

    def worker(address):
        made = SchedulerReports(
            WorkerSettings(scheduler_reports=address), hello=None, load=None, cost=WorkerCost(),
            on_stale=lambda: None,
        )  # fmt: skip
        made._link._on_up = lambda: made._link.send(reports.Goodbye(instance="w", epoch=1))
        made._link.open()
        return made._link.close

    def mempool(address):
        hello = mempool_peer.PeerHello(instance="m", boot_generation=1)
        owner = SimpleNamespace(lost=lambda address: None)
        return PeerLink(address, hello, owner, Background(), 1_500).close

    for into, out, make, whose in (
        (placement.TO_SCHEDULER, placement.FROM_SCHEDULER, gateway, "the scheduler"),
        (reports.REPORTS, reports.REPORT_REPLIES, worker, "the scheduler"),
        (mempool_peer.TO_SOURCE, mempool_peer.TO_READER, mempool, "the mempool"),
    ):
        server, close = await answered_with_nonsense(into, out, make)
        opened += [server.close, close]
        wants.append(f"{whose} at {server.address}")
        await until(lambda: len(said) == len(wants))
    assert said == wants
    for close in opened:
        close()
