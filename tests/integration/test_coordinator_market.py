"""The memory market with real coordinators and a real Redis, each killed, wiped or paused with leases out."""

import asyncio
import os
import signal

import httpx
import pytest

from services.coordinator.config import CoordinatorSettings
from services.coordinator.market_shell import MarketShell
from shared.errors import PeerError
from shared.free_ports import free_port
from shared.ids import InstanceId
from shared.prompttree.embedded import EmbeddedRedis
from shared.transport.clock import MonotonicClock
from shared.transport.lending_client import LendingClient
from shared.transport.redis_link import RedisLink
from shared.wire.lending import AskReclaim, Grant, LendingRefused, Placement
from tests.support.control_plane import ServiceProcess, until, until_async
from tests.support.market_rig import LiveMempool, ask, granted, until_market, until_offered
from tests.support.market_world import GIB

TIMES = (
    "--report-interval-ms", "50", "--report-idle-ms", "100", "--report-ttl-ms", "1500", "--lease-ttl-ms", "3600000",
)  # fmt: skip


class Coordinator:
    """A process that can be killed and started again on the same address."""

    def __init__(self, redis, name, leader_lease_ms, *more):
        more = ("--leader-lease-ms", str(leader_lease_ms), *more)
        self.flags = ("--redis-url", redis.url, "--instance", name, *TIMES, *more)
        self.listen = f"127.0.0.1:{free_port()}"  # which nobody gets between a kill and a start

    def start(self):
        self.process = ServiceProcess("services.coordinator", "--listen", self.listen, *self.flags)
        return self

    def wait(self):
        self.listen = self.process.wait_log("listening", 60.0)["address"]
        return self

    @property
    def url(self):
        return f"http://{self.listen}"

    async def role(self):
        async with httpx.AsyncClient(trust_env=False, timeout=30.0) as http:
            try:
                return (await http.get(f"{self.url}/ready")).json()["role"]
            except httpx.HTTPError:
                return "silent"


@pytest.fixture
def redis(tmp_path):
    server = EmbeddedRedis(0, tmp_path, appendonly=True)
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def opened():
    things = []
    yield things
    for thing in reversed(things):
        await thing.close()


@pytest.fixture
def started(redis):
    made = []

    def start(*names, leader_lease_ms=60_000):
        made.extend(Coordinator(redis, name, leader_lease_ms).start() for name in names)
        return [one.wait() for one in made]

    yield start
    for one in made:
        one.process.kill()


def reach(opened, urls):
    client, mempool = LendingClient(urls, patience_ms=60_000), LiveMempool(urls)
    opened.extend([client, mempool])
    return client, mempool


async def asked(client, *, gib, key):
    """A grant, asked for until the coordinator has heard of the mempool again: the machine may have kept it silent."""
    found = []

    async def there():
        found.append(await client.lease(ask(gib=gib), key=key))
        return isinstance(found[-1], Grant)

    await until_async(there, 60.0)
    return found[-1]


def held(view):
    return {x.lease_id for x in view.leases if x.state == "held"}


async def test_a_killed_and_a_wiped_coordinator_find_the_leases_again_and_grant_nothing_twice(
    started, opened, redis, tmp_path
):
    (coordinator,) = started("coordinator-0")
    client, mempool = reach(opened, coordinator.url)
    await until_offered(client, mempool)
    lease = await granted(client, mempool, gib=3, key="lease")
    term = (await until_market(client, lambda view: lease.lease_id in held(view))).term
    on_its_way = await asked(client, gib=1, key="on-its-way")
    for wipe in (False, True):
        coordinator.process.kill()
        if wipe:
            redis.kill()
            for file in tmp_path.rglob("*.aof*"):
                file.unlink()
            for file in tmp_path.rglob("*.rdb"):
                file.unlink()
            redis.start()
        coordinator.start().wait()
        view = await until_market(client, lambda view: view.is_granting and held(view))
        assert view.term > term
        term = view.term
        assert held(view) == {lease.lease_id}
        assert (await asked(client, gib=3, key="lease")).lease_id == lease.lease_id
        refused = await client.lease(ask(gib=2), key="too-much")
        assert isinstance(refused, LendingRefused)
        assert (refused.code, mempool.model.leased_bytes(lease.offer_id)) == ("offers.exhausted", 3 * GIB)
        assert not mempool.present(on_its_way), "a grant of an earlier term is refused by its token"


async def test_a_standby_takes_over_from_a_paused_leader_and_the_woken_one_is_refused(started, opened):
    pair = started("coordinator-a", "coordinator-b", leader_lease_ms=4_000)
    client, mempool = reach(opened, ",".join(one.url for one in pair))
    await until_offered(client, mempool)
    lease = await granted(client, mempool, gib=1, key="lease")
    before = await asked(client, gib=1, key="on-its-way")
    roles = []

    async def both_know():
        roles[:] = [await one.role() for one in pair]
        return sorted(roles) == ["leader", "standby"]

    await until_async(both_know, 60.0)
    old, new = pair if roles[0] == "leader" else reversed(pair)
    os.kill(old.process.process.pid, signal.SIGSTOP)
    try:
        view = await until_market(client, lambda view: view.is_granting and held(view) == {lease.lease_id})
        assert await new.role() == "leader"
        assert view.term > before.token.term
        taken = await granted(client, mempool, gib=3, key="after")
    finally:
        os.kill(old.process.process.pid, signal.SIGCONT)
    assert not mempool.present(before)
    direct = LendingClient(old.url, patience_ms=20_000)
    opened.append(direct)
    refused = await direct.lease(ask(gib=1), key="of-the-woken-one")
    assert isinstance(refused, LendingRefused)
    assert refused.code == "market.standby"

    async def stands_by():
        return await old.role() == "standby"

    await until_async(stands_by, 60.0)
    refused = await direct.market()
    assert (refused.code, refused.leader) == ("market.standby", new.url)
    assert mempool.model.leased_bytes(taken.offer_id) == 4 * GIB


async def test_reclaims_come_to_the_mempool_and_back_as_done(started, opened):
    (coordinator,) = started("coordinator-0")
    client, mempool = reach(opened, coordinator.url)
    await until_offered(client, mempool)
    lease = await granted(client, mempool, gib=3)
    words = AskReclaim(
        offer_id=lease.offer_id, producer=InstanceId("p0"), length_bytes=2 * GIB, deadline_ms=50
    )
    order = await client.reclaim(words, key="r")
    assert order.keep_bytes == 2 * GIB
    assert (await client.reclaim(words, key="r")).reclaim_id == order.reclaim_id

    async def done():
        return (await client.reclaim_state(order.reclaim_id)).state == "done"

    await until_async(done, 60.0)
    assert mempool.model.leased_bytes(lease.offer_id) == 2 * GIB
    renewed = await client.renew(lease)
    assert (renewed.length_bytes, renewed.keep_bytes) == (2 * GIB, 2 * GIB)
    assert await client.release(lease) is None
    await until(lambda: mempool.model.leased_bytes(lease.offer_id) == 0)
    async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
        page = (await http.get(coordinator.url)).text
    assert "Memory market" in page
    assert lease.lease_id in page


async def shell(redis, opened, **settings):
    made = MarketShell(
        CoordinatorSettings(redis_url=redis.url, **settings),
        MonotonicClock(),
        url="http://127.0.0.1:1",
        unix_us=lambda: 1_000,
        on_lead=lambda: None,
    )
    await made.start(20_000)

    class Closed:
        close = staticmethod(made.stop)

    opened.append(Closed)
    return made


async def test_nothing_is_granted_while_redis_is_down_and_the_next_term_follows(redis, opened):
    made = await shell(redis, opened, leader_lease_ms=1_500)
    await until(lambda: made.role() == "leader", 60.0)
    term = made.market.book.term
    redis.kill()
    await until(lambda: made.view().why_not in ("journal.down", "market.standby"))
    answer = await made.lease(ask(), "k")
    assert answer.retry_after_ms > 0
    await until(lambda: made.role() == "unknown")
    redis.start()
    await until(lambda: made.role() == "leader", 60.0)
    assert made.market.book.term > term


async def test_nothing_is_granted_between_a_wiped_journal_and_the_term_that_knows_it(redis, opened):
    """A leader that finds itself elected anew hears its mempools before it grants, and reads before that."""
    made = await shell(redis, opened, leader_lease_ms=60_000)
    term, journal = made.leadership.term, made._journal
    read, reads, goes_on = journal.read, asyncio.Event(), asyncio.Event()

    async def slow():
        reads.set()
        await goes_on.wait()
        return await read()

    journal.read = slow
    link = RedisLink(redis.url)
    link.open()
    await until(lambda: link.up)
    await link.call("FLUSHALL", timeout_ms=5_000)
    made._wake.set()
    await asyncio.wait_for(reads.wait(), 60.0)
    placed, answer = await made.place(Placement(pairs=[])), await made.lease(ask(), "k")
    assert placed, "it was noted for a journal that forgets it"
    assert (placed.code, answer.code) == ("market.standby", "market.standby")
    goes_on.set()
    await until(lambda: made.role() == "leader", 60.0)
    assert made.market.book.term > term
    await link.close()


async def test_a_journal_that_is_not_fsynced_always_is_said_and_refused_where_it_is_required(redis, opened):
    made = await shell(redis, opened, journal_fsync="always", leader_lease_ms=60_000)
    await until(lambda: made.fsync_policy == "everysec")
    await until(lambda: made.view().why_not == "journal.not_durable")
    assert (await made.lease(ask(), "k")).code == "journal.not_durable"


async def test_a_journal_whose_fsync_is_changed_under_it_is_noticed_within_a_claim(redis, opened):
    made = await shell(redis, opened, journal_fsync="always", leader_lease_ms=1_500)
    await until(lambda: made.view().why_not == "journal.not_durable")
    link = RedisLink(redis.url)
    opened.append(link)
    link.open()
    await until(lambda: link.up)
    for policy, refused in (("always", False), ("everysec", True), ("always", False)):
        await link.call("CONFIG", "SET", "appendfsync", policy, timeout_ms=5_000)
        await until(lambda refused=refused: (made._trouble() == "journal.not_durable") == refused, 30.0)
        assert made.fsync_policy == policy


async def test_a_connection_made_while_another_is_asked_how_it_writes_is_asked_too(redis, opened):
    made = await shell(redis, opened, journal_fsync="always", leader_lease_ms=60_000)

    class Reconnecting:
        up = True

        async def fsync_policy(self):
            made._journal_is_up()
            return "always"

    await made._check_durability(Reconnecting())
    assert made.fsync_policy == "always", "of the one that is gone"
    assert made._trouble() == "journal.not_durable"


async def test_a_client_says_when_nobody_answers():
    client = LendingClient("http://127.0.0.1:9", patience_ms=200)
    with pytest.raises(PeerError):
        await client.market()
    await client.close()


async def test_a_reporter_goes_on_until_a_coordinator_is_there(opened):
    mempool = LiveMempool("http://127.0.0.1:9")
    opened.append(mempool)
    await until(lambda: mempool.model.seq >= 2)
    assert not mempool.reporter.reachable
