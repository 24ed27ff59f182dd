"""Who writes the coordinators' journal of members: two coordinators, a real Redis, and a way to it that is cut."""

import asyncio
import time
from types import SimpleNamespace

import msgspec
import pytest

from services.coordinator import journal as members_journal
from services.coordinator import market_journal, shell
from services.coordinator.config import CoordinatorSettings
from services.coordinator.core import membership
from services.coordinator.core.membership import JournalEntry
from services.coordinator.journal import KEY, Journal
from services.coordinator.shell import Coordinator
from shared.ids import InstanceId
from shared.prompttree.embedded import EmbeddedRedis
from shared.transport.clock import MonotonicClock
from shared.transport.redis_link import RedisLink
from shared.wire.membership import Heartbeat, HeartbeatReply
from tests.support.control_plane import register, until, until_async

P0, P1 = InstanceId("p0"), InstanceId("p1")
LEASE_MS = 1_000
KEPT_MS = 60_000  # of who leads as long as the test wants, whatever pauses there are


@pytest.fixture(autouse=True)
def a_disk_may_be_slow(monkeypatch):
    """And a Redis that gets no core."""
    for module in (members_journal, market_journal):
        monkeypatch.setattr(module, "DEADLINE_MS", 10_000)


class Way:
    """To Redis; while it is cut nothing passes, and nobody connects. What Redis says is late by `late_s`."""

    late_s = 0.0

    def __init__(self, port):
        self._port, self._writers, self.is_cut = port, [], False

    async def open(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    async def _serve(self, reader, writer):
        self._writers.append(writer)
        if self.is_cut:
            writer.close()
            return
        behind, to_redis = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers.append(to_redis)
        ways = self._pass(reader, to_redis), self._pass(behind, writer, self)
        await asyncio.gather(*ways, return_exceptions=True)

    @staticmethod
    async def _pass(reader, writer, late=None):
        while data := await reader.read(65_536):
            await asyncio.sleep(late.late_s if late is not None else 0)
            writer.write(data)
            await writer.drain()
        writer.close()

    def cut(self):
        self.is_cut = True
        for writer in self._writers:
            writer.close()

    async def close(self):
        self.is_cut = True
        self.cut()
        self._server.close()


@pytest.fixture
async def world(tmp_path):
    server = EmbeddedRedis(0, tmp_path)
    server.start()
    link = RedisLink(server.url)
    link.open()
    assert await link.wait_up(60_000)
    way = Way(server.port)
    found = SimpleNamespace(redis=server, link=link, way=way, way_url=await way.open(), opened=[])
    yield found
    for coordinator in found.opened:
        await coordinator.stop()
    await link.close()
    await way.close()
    server.kill()


async def led(world, name, url="", lease_ms=LEASE_MS) -> Coordinator:
    """A coordinator that answers; nobody beats here, so nobody is forgotten for its silence."""
    settings = CoordinatorSettings(
        instance=name, redis_url=url or world.redis.url, leader_lease_ms=lease_ms, journal_wait_ms=20_000,
        ttl_ms=600_000,
    )  # fmt: skip
    made = Coordinator(settings, MonotonicClock(), url=f"http://{name}")
    await made.start()
    world.opened.append(made)
    return made


async def stored(world) -> dict[str, JournalEntry]:
    reply = await world.link.call("HGETALL", KEY, timeout_ms=5_000)
    return {
        n.decode(): msgspec.json.decode(raw, type=JournalEntry)
        for n, raw in zip(reply[::2], reply[1::2], strict=True)
    }


async def until_written(coordinator: Coordinator) -> None:
    assert coordinator._journal is not None
    await until(lambda: coordinator._journal.up)


async def test_what_a_former_leader_had_to_write_is_not_put_over_its_successors(world):
    former = await led(world, "former", world.way_url)
    former.register(register(P0))
    former.register(register(P1))
    await until_written(former)
    world.way.cut()
    old = former.register(register(P0)).epoch  # told, and not written: its Redis is away
    second = await led(world, "second", lease_ms=KEPT_MS)
    await until(lambda: second.lending.role() == "leader")
    new = second.register(register(P0)).epoch
    await until_written(second)
    assert new > old
    before = await stored(world)
    world.way.is_cut = False
    await until(lambda: former.lending.role() == "standby")
    await until(lambda: former._journal is not None and former._journal._link.up)
    await asyncio.sleep(2.5)  # beyond both of its ways to try again
    assert await stored(world) == before
    assert former._journal is not None
    assert former._journal.up, "nothing of it waits to be written"
    assert (before[P0].epoch, before[P0].member is not None) == (new, True)


async def test_a_leader_answers_no_member_before_it_knows_whom_the_one_before_had_registered(world):
    """It would tell the living to register anew, and what they lend would be taken back."""
    world.way.late_s = 0.05
    first = await led(world, "first", lease_ms=KEPT_MS)
    epoch = first.register(register(P0)).epoch
    await until_written(first)
    second = await led(world, "second", world.way_url)
    assert second.lending.role() == "standby"
    await first.stop()
    world.opened.remove(first)
    deadline = time.monotonic() + 60
    while second.leader_url:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)
    assert isinstance(second.heartbeat(P0, Heartbeat(epoch=epoch)), HeartbeatReply)


async def test_a_former_leader_that_leads_again_knows_whom_the_one_between_had_registered(world):
    former = await led(world, "former", world.way_url)
    former.register(register(P0))
    await until_written(former)
    world.way.cut()
    for name in (P0, P1):
        assert former.remove(name, former.register(register(name)).epoch) is None  # neither is written
    second = await led(world, "second", lease_ms=KEPT_MS)
    await until(lambda: second.lending.role() == "leader")
    new, left = (second.register(register(name)).epoch for name in (P0, P1))
    assert second.remove(P1, left) is None
    await until_written(second)
    world.opened.remove(second)
    await second.stop()
    world.way.is_cut = False
    await until(lambda: former.lending.role() == "leader")
    await until_written(former)
    assert [(view.instance, view.epoch) for view in former.listing().instances] == [(P0, new)]
    kept = await stored(world)
    assert (kept[P0].epoch, kept[P0].member is not None) == (new, True)
    assert (kept[P1].epoch, kept[P1].member) == (left, None), "epochs only grow, of those who left too"


async def test_what_a_leader_noted_while_redis_was_away_is_written_in_the_term_that_follows(world):
    alone = await led(world, "alone", world.way_url)
    await until_written(alone)
    world.way.cut()
    await until(lambda: alone.lending.role() == "unknown")
    epoch = alone.register(register(P0)).epoch
    world.way.is_cut = False
    await until_written(alone)
    assert (await stored(world))[P0].epoch == epoch


async def test_redis_takes_no_word_of_who_does_not_lead_in_this_term(world):
    """However late it comes: a process that was paused between its look at the clock and its write."""
    leader = await led(world, "leader", lease_ms=KEPT_MS)
    await until_written(leader)
    owner, boot, term = leader.lending.fence
    for fence in ((owner, boot, term - 1), (owner, "another", term), ("another", boot, term)):
        journal = Journal(world.redis.url, lambda _: None, lambda fence=fence: fence)
        journal.note([JournalEntry(instance=P0, epoch=1)])
        assert await journal.start(20_000)
        await asyncio.sleep(0.1)
        assert not journal.up, "it stays noted"
        await journal.close()
    assert await stored(world) == {}


async def test_members_are_written_before_a_coordinator_resigns(world, monkeypatch):
    """Whoever leads next reads at once: what is written later is not read, or is put over what it writes."""
    first = await led(world, "first", lease_ms=KEPT_MS)
    await until_written(first)
    registered = []
    real_close = Journal.close
    seen = []

    async def close(journal):
        seen.append(await world.link.call("EXISTS", "quire:coordinator:leader", timeout_ms=5_000))
        await real_close(journal)

    monkeypatch.setattr(Journal, "close", close)
    world.opened.remove(first)
    registered.append(first.register(register(P0)).epoch)  # nobody has had the time to write it
    await first.stop()
    assert seen == [1], "it led when it wrote"
    assert (await stored(world))[P0].epoch == registered[0]
    assert await world.link.call("EXISTS", "quire:coordinator:leader", timeout_ms=5_000) == 0, (
        "it has resigned"
    )


async def test_the_journal_of_members_is_bounded_and_what_a_rebuild_needs_stays(world, monkeypatch):
    monkeypatch.setattr(membership, "MAX_KNOWN_EPOCHS", 5)
    first = await led(world, "first")
    stays = first.register(register(P0)).epoch
    for number in range(20):
        name = InstanceId(f"worker-{number}")
        epoch = first.register(register(name)).epoch
        await until_written(first)
        assert first.remove(name, epoch) is None
    await until_written(first)
    left = await stored(world)
    assert sorted(left) == sorted([P0, "worker-16", "worker-17", "worker-18", "worker-19"])
    world.opened.remove(first)
    await first.stop()
    monkeypatch.setattr(shell, "_unix_us", lambda: 1_000)  # the clock went back
    after = await led(world, "after")
    assert [(view.instance, view.epoch) for view in after.listing().instances] == [(P0, stays)]
    assert after.register(register("worker-19")).epoch > left["worker-19"].epoch


async def test_a_journal_that_an_earlier_version_let_grow_is_cut_to_its_bound(world, monkeypatch):
    entries = [JournalEntry(instance=InstanceId(f"w{n}"), epoch=n + 1) for n in range(1_500)]
    entries.append(JournalEntry(instance=P0, epoch=1, member=register(P0)))
    words = [word for entry in entries for word in (entry.instance, msgspec.json.encode(entry))]
    await world.link.call("HSET", KEY, *words, timeout_ms=5_000)
    monkeypatch.setattr(membership, "MAX_KNOWN_EPOCHS", 100)
    found = await led(world, "first")
    await until_written(found)
    left = await stored(world)
    assert sorted(left) == sorted([P0, *(f"w{n}" for n in range(1_401, 1_500))])
    assert left[P0].member is not None


async def test_nothing_is_read_before_redis_has_said_who_leads(world):
    """A restored view of before would put its own members over those that another one leads."""
    fence = []
    restored = []
    journal = Journal(world.redis.url, restored.append, lambda: fence[0] if fence else None)
    assert not await journal.start(1_500)
    assert restored == []
    fence.append(("owner", "boot", 1))

    async def was_read():
        return bool(restored)

    await until_async(was_read, 10.0)
    await journal.close()
