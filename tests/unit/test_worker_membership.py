"""How often a worker asks for a larger epoch, on a clock of its own."""

import asyncio
from contextlib import closing
from itertools import pairwise

import pytest

from shared.engine.interface import EngineLoad
from shared.engine.worker_config import WorkerSettings
from shared.engine.worker_membership import CALM_MS, MAX_PAUSE_MS, MembershipKeeper
from shared.errors import PeerProtocolError
from shared.ids import Epoch, InstanceId
from shared.transport import membership_client
from shared.transport.membership_client import MembershipClient
from shared.wire.membership import HeartbeatReply, Registered
from tests.support.virtual_time import VirtualLoop

IDLE = EngineLoad(
    num_running=0, num_waiting=0, unfinished_prefill_tokens=0, running_context_tokens=0, kv_used_share=0.0,
    step_ms=0.0,
)  # fmt: skip


class Coordinator:
    """Grants one epoch after another. `said`: when it was asked what, by every client."""

    said: list[tuple[float, str]]

    def __init__(self, *_):
        pass

    async def ask(self, method, path, reply, body=None):
        del method, path, body
        self.said.append((asyncio.get_running_loop().time(), reply.__name__))
        if reply is Registered:
            return Registered(epoch=Epoch(len(self.said)), heartbeat_interval_ms=500, ttl_ms=1_500)
        return HeartbeatReply(ttl_ms=1_500)

    async def close(self):
        pass


def times(kind, begin_s=0.0):
    return [at_s for at_s, said in Coordinator.said if said == kind and at_s >= begin_s]


@pytest.fixture(autouse=True)
def coordinator(monkeypatch):
    monkeypatch.setattr(Coordinator, "said", [], raising=False)
    monkeypatch.setattr(membership_client, "CoordinatorApi", Coordinator)


async def refused(until_s: float, keeper: MembershipKeeper | None = None) -> MembershipKeeper:
    """Every epoch is stale, to the scheduler and every 2 s."""
    if keeper is None:
        instance = type("Register", (), {"instance": InstanceId("i")})
        keeper = MembershipKeeper(
            WorkerSettings(), register=lambda _: instance, load=lambda: IDLE, on_epoch=lambda _: None
        )  # type: ignore[arg-type]
        keeper.start("tcp://w")
    while asyncio.get_running_loop().time() < until_s:
        await asyncio.sleep(0.1)
        keeper.register_again()
    return keeper


def test_a_worker_whose_every_epoch_is_stale_registers_ever_more_seldom_and_beats_meanwhile():
    """It registered every 0.4 s, 443 times; and who does not beat is no member that the scheduler would believe."""
    with closing(VirtualLoop()) as loop:
        loop.run_until_complete(refused(300.0))
        at = times("Registered")
        gaps = [after - before for before, after in pairwise(at)]
        assert len(gaps) < 17, gaps
        assert gaps[0] < 1
        assert gaps == sorted(gaps) or max(gaps) - gaps[-1] < 1, gaps
        assert MAX_PAUSE_MS / 1000 <= gaps[-1] < MAX_PAUSE_MS / 1000 + 1
        beats = times("HeartbeatReply")
        assert max(after - before for before, after in pairwise(beats)) < 1.5


def test_a_worker_that_was_left_alone_for_a_while_registers_again_at_once():
    with closing(VirtualLoop()) as loop:
        keeper = loop.run_until_complete(refused(60.0))
        calm_s = (MAX_PAUSE_MS + 2 * CALM_MS) / 1000
        loop.run_until_complete(asyncio.sleep(calm_s))
        begin_s = loop.time()
        loop.run_until_complete(refused(begin_s + 1, keeper))
        assert times("Registered", begin_s)


def test_a_member_that_cannot_register_says_why_every_30_s(monkeypatch):
    """The log's end has the reason, however long it waits; a key that was refused was said once, and nobody saw it."""

    async def refuse(self, *_):
        raise PeerProtocolError("POST /v1/instances: 401")

    async def run():
        client = MembershipClient(
            "http://c", type("Register", (), {"instance": InstanceId("i")})(),
            heartbeat=lambda _: None, on_epoch=lambda _: None,
            on_event=lambda event, ids: said.append((asyncio.get_running_loop().time(), event)),
        )  # fmt: skip
        client.open()
        await asyncio.sleep(100)
        await client.close()

    monkeypatch.setattr(Coordinator, "ask", refuse)
    said: list[tuple[float, str]] = []
    with closing(VirtualLoop()) as loop:
        loop.run_until_complete(run())
    at_s = [when for when, event in said if event == "register_failed"]
    assert len(at_s) == 4, at_s
    assert all(29.9 < after - before < 33 for before, after in pairwise(at_s))
