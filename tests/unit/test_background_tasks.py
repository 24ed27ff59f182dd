"""A bug that ends a background task is told to the loop, which ends the process: no function stops silently."""

import asyncio
from types import SimpleNamespace

import pytest

from services.gateway import cluster
from services.gateway.core.request_flow import Limits
from services.mempool.core.wishes import Wish
from services.mempool.desk_loop import DeskLoop
from services.mempool.tree import TreePublishers
from shared.background_task import LOST_TASK, begin_task
from shared.engine.worker_loads import LoadReports
from shared.engine.worker_room import DecodeRoom
from shared.ids import Epoch, InstanceId
from shared.mempool.client import MempoolClient
from shared.prompttree.breaker import Breaker
from shared.prompttree.client import PromptTreeClient
from shared.prompttree.publisher import PromptTreePublisher
from shared.transport.coordinator_api import CoordinatorApi
from shared.transport.membership_client import MembershipPoller
from shared.transport.redis_link import RedisLink
from shared.transport.zmq_channel import DealerLink
from shared.wire.lending import AskReclaim
from shared.wire.membership import InstanceList
from shared.wire.requests import TO_GATEWAY, TO_WORKER
from tests.integration.gateway_rig import until

NOWHERE = "redis://127.0.0.1:1"


class Bug(Exception):
    pass


def bug(*_args, **_how):
    raise Bug


@pytest.fixture
async def raised():
    """A future of what ended the first background task that a bug ended, as end_on_bug() hears of it."""
    loop = asyncio.get_running_loop()
    found = loop.create_future()

    def handler(_, context):
        if LOST_TASK in context and not found.done():
            found.set_result(context["exception"])

    loop.set_exception_handler(handler)
    yield found
    loop.set_exception_handler(None)


async def ends_loudly(raised):
    assert isinstance(await asyncio.wait_for(raised, 30), Bug)


async def test_what_a_task_raises_is_told_to_the_loop_and_a_cancelled_one_says_nothing(raised):
    async def fails():
        bug()

    begin_task(asyncio.sleep(60), "sleeps").cancel()
    await asyncio.sleep(0.01)
    assert not raised.done()
    begin_task(fails(), "fails")
    await ends_loudly(raised)


def desk(**pool):
    shell = SimpleNamespace(
        pool=SimpleNamespace(learn_rates=lambda rates: None, **pool),
        spaces=SimpleNamespace(pair_rates=dict),
        clock=SimpleNamespace(now_ms=lambda: 0),
        perform=lambda actions: None,
    )
    return DeskLoop("http://127.0.0.1:1", "", shell, SimpleNamespace(words=[]), interval_ms=1)


async def test_a_desk_that_cannot_decide_ends_loudly(raised):
    it = desk(decide_market=bug)
    it.open()
    await ends_loudly(raised)
    await it.close()


async def test_an_answer_to_a_wish_that_is_misunderstood_ends_loudly(raised, monkeypatch):
    wish = Wish(key="k", body=AskReclaim(offer_id="o", producer=InstanceId("m"), deadline_ms=1), space=0)
    it = desk(decide_market=lambda now_ms: ([wish], []), on_wish_answered=bug)

    async def answers(*_args, **_how):
        return None

    monkeypatch.setattr(it._client, "reclaim", answers)
    it.open()
    await ends_loudly(raised)
    await it.close()


async def test_a_tree_whose_spaces_cannot_be_told_ends_loudly(raised):
    it = TreePublishers(NOWHERE, "m", "", SimpleNamespace(audience=SimpleNamespace(now=bug)))
    it.open()
    await ends_loudly(raised)
    await it.close()


async def test_a_publisher_ends_loudly(raised, monkeypatch):
    it = PromptTreePublisher(NOWHERE, owner="o", epoch=Epoch(1), row="prefill")
    monkeypatch.setattr(it, "_held_blocks", SimpleNamespace(set=bug))
    it.open()
    await ends_loudly(raised)
    await it.close()


def answers_members(monkeypatch):
    async def ask(*_args, **_how):
        return InstanceList(instances=[], version=1)

    monkeypatch.setattr(CoordinatorApi, "ask", ask)


async def test_a_poller_whose_list_is_misunderstood_ends_loudly(raised, monkeypatch):
    answers_members(monkeypatch)
    it = MembershipPoller("http://127.0.0.1:1", on_list=bug)
    it.open()
    await ends_loudly(raised)
    await it.close()


async def test_an_address_that_no_coordinator_can_have_is_one_that_nobody_reaches(raised):
    it = MembershipPoller("http://[::1", interval_ms=1, on_list=bug)
    it.open()
    await it.asked.wait()
    await asyncio.sleep(0.01)
    assert not raised.done()
    assert not it.reachable
    await it.close()


async def test_a_probe_of_redis_that_fails_by_a_bug_ends_loudly(raised, monkeypatch):
    it = PromptTreeClient(NOWHERE, breaker=Breaker(max_failures=1, probe_interval_ms=1))
    monkeypatch.setattr(it._link, "call", bug)
    it._on_failure(ValueError("no answer"))
    await ends_loudly(raised)
    await it.close()


async def test_a_gateway_that_cannot_tick_says_so(raised, monkeypatch):
    """Workers end what a gateway asked for that says Alive no more."""
    monkeypatch.setattr(cluster, "ALIVE_INTERVAL_MS", 1)
    it = cluster.Cluster("tcp://127.0.0.1:1", model="m", limits=Limits())
    monkeypatch.setattr(it, "_tick", bug)
    it.start()
    await ends_loudly(raised)
    await it.stop()


async def test_a_worker_that_cannot_say_its_load_says_so(raised):
    client = SimpleNamespace(load_interval_ms=1, report_load=bug)
    it = LoadReports(client, "m", load=bug, num_arrived=bug, epoch=lambda: Epoch(1))
    it.open()
    await ends_loudly(raised)
    await it.close()


async def test_a_worker_that_cannot_look_for_room_says_so(raised, monkeypatch):
    it = DecodeRoom(SimpleNamespace(), SimpleNamespace(), SimpleNamespace())
    monkeypatch.setattr(it, "_queue", SimpleNamespace(question=bug))
    it.open()
    await ends_loudly(raised)
    await it.close()


async def test_a_client_of_a_mempool_that_cannot_connect_by_a_bug_says_so(raised, monkeypatch, tmp_path):
    it = MempoolClient(tmp_path / "pool.sock", InstanceId("i"))
    monkeypatch.setattr(it._link, "connect", bug)
    it.start()
    await ends_loudly(raised)
    await it.close()


async def test_a_link_to_redis_whose_owner_cannot_go_on_when_it_is_up_ends_loudly(raised, monkeypatch):
    """It made no connection any more, and nobody heard why."""
    it = RedisLink(NOWHERE, on_up=bug)

    async def connects():
        return SimpleNamespace(abort=lambda: None)

    monkeypatch.setattr(it, "_connect", connects)
    it.open()
    await ends_loudly(raised)
    await it.close()


def dealer(endpoint):
    return DealerLink(endpoint, out=TO_WORKER, into=TO_GATEWAY, on_message=lambda *_: None)


async def test_a_link_that_cannot_dial_by_a_bug_ends_loudly(raised, monkeypatch):
    it = dealer("tcp://127.0.0.1:1")
    monkeypatch.setattr(it, "_dial", bug)
    it.open()
    await ends_loudly(raised)
    it.close()


async def test_a_name_that_no_host_can_have_is_a_peer_that_is_not_there(raised, monkeypatch):
    """Python's resolver raises ValueError for it: an endpoint that some worker named is nobody's bug."""
    dials = []
    it = dealer("tcp://a..b:1")
    dial = it._dial

    async def counted(where):
        dials.append(where)
        await dial(where)

    monkeypatch.setattr(it, "_dial", counted)
    it.open()
    redis = RedisLink("redis://a..b:1")
    redis.open()
    await until(lambda: len(dials) > 1 and redis.last_error)
    assert not raised.done()
    it.close()
    await redis.close()
