"""The coordinator's journal against a real Redis: who leads, and for how long."""

import asyncio
import time

import pytest

from services.coordinator import market_journal
from services.coordinator.market_journal import Claim, MarketJournal, NotLeading
from shared.prompttree.embedded import EmbeddedRedis
from shared.transport.redis_link import RedisLink, RedisRefused

LIMIT_S = 60.0
TREES = 20


@pytest.fixture(autouse=True)
def a_disk_may_be_slow(monkeypatch):
    """Who writes images beside these tests holds up Redis' journal."""
    monkeypatch.setattr(market_journal, "DEADLINE_MS", 30_000)


@pytest.fixture
def redis(tmp_path):
    server = EmbeddedRedis(0, tmp_path, appendonly=True)
    server.start()
    yield server
    server.kill()


async def journal(redis: EmbeddedRedis, owner: str, boot: str = "1") -> MarketJournal:
    up = asyncio.Event()
    made = MarketJournal(redis.url, owner=owner, boot=boot, url=f"http://{owner}", on_up=up.set)
    made.open()
    await asyncio.wait_for(up.wait(), LIMIT_S)
    return made


async def led(one: MarketJournal, lease_ms: int) -> int:
    """The term that it has begun."""
    term = (await one.claim(lease_ms, above_term=0)).term
    one.begin(term)
    return term


async def test_a_full_redis_evicts_trees_and_not_who_leads(redis):
    leader, standby = await journal(redis, "leader"), await journal(redis, "standby")
    up = asyncio.Event()
    link = RedisLink(redis.url, on_up=up.set)
    link.open()
    await asyncio.wait_for(up.wait(), LIMIT_S)

    async def call(*words: object) -> object:
        return await link.call(*words, timeout_ms=5_000)

    await call("CONFIG", "SET", "maxmemory", "6mb")
    await call("CONFIG", "SET", "maxmemory-policy", "volatile-ttl")
    term = await led(leader, 60_000)
    leader.note({}, [("event", "subject", "detail")])
    await leader.flush()
    for number in range(3_000):
        tree = f"tree:{number % TREES}"
        try:
            await call("SADD", tree, *(f"{number}-{i}-{'y' * 24}" for i in range(50)))
        except RedisRefused:
            break  # nothing is left to evict
        await call("EXPIRE", tree, 600)
    stats = await call("INFO", "stats")
    assert isinstance(stats, bytes)
    assert b"evicted_keys:" in stats
    assert b"evicted_keys:0\r" not in stats, "it was full"
    assert await standby.claim(60_000, above_term=0) == Claim(0, "http://leader")
    assert (await leader.claim(60_000, above_term=0)).term == term
    await call("CONFIG", "SET", "maxmemory", "1")  # nothing is left that could be evicted
    with pytest.raises(RedisRefused, match="OOM"):
        await call("SET", "anything", "more")
    assert (await leader.claim(60_000, above_term=0)).term == term
    leader.note({}, [("event", "when it was full", "detail")])
    await leader.flush()
    assert (await standby.read()).history[-1][1] == "when it was full"
    await link.close()
    await leader.close(resign=False)
    await standby.close(resign=False)


async def test_what_cannot_be_decoded_is_left_out_of_what_a_leader_reads(redis):
    leader, link = await journal(redis, "leader"), RedisLink(redis.url)
    await led(leader, 60_000)
    leader.note({}, [("event", "good", "detail")])
    await leader.flush()
    link.open()
    assert await link.wait_up(60_000)
    for line in (b"not JSON", b'["another", "version\'s"]', b'["bad", "UTF-8", "\xff"]'):
        await link.call("RPUSH", "quire:coordinator:history", line, timeout_ms=5_000)
        await link.call("HSET", "quire:coordinator:market", "offer:x", line, timeout_ms=5_000)
        assert [subject for _, subject, _ in (await leader.read()).history] == ["good"]
    await link.close()
    await leader.close(resign=False)


async def test_a_lapsed_leader_writes_nothing_and_leads_again_in_a_new_term_only(redis):
    leader, standby = await journal(redis, "leader"), await journal(redis, "standby")
    first = await led(leader, 50)
    end_s = time.monotonic() + LIMIT_S
    while not (second := await led(standby, 60_000)):
        assert time.monotonic() < end_s
        await asyncio.sleep(0.01)
    assert second > first
    leader.note({}, [("event", "subject", "detail")])
    with pytest.raises(NotLeading):
        await leader.flush()
    assert (await leader.claim(50, above_term=0)).leader_url == "http://standby"
    await standby.close(resign=True)

    again = await led(leader, 30)
    assert again > second, "who resigned is followed at once"
    await asyncio.sleep(0.06)
    leader.note({}, [("event", "of the lapsed term", "detail")])
    with pytest.raises(NotLeading):
        await leader.flush()
    assert await led(leader, 60_000) > again, "nobody else led, but it had lapsed"
    leader.note({}, [("event", "of the new term", "detail")])
    await leader.flush()
    assert [subject for _, subject, _ in (await leader.read()).history] == ["of the new term"]
    await leader.close(resign=False)


async def test_what_is_of_an_earlier_term_of_the_same_leader_is_not_written(redis):
    leader, link = await journal(redis, "leader"), RedisLink(redis.url)
    await led(leader, 60_000)
    link.open()
    assert await link.wait_up(60_000)
    await link.call("FLUSHALL", timeout_ms=5_000)
    assert (await leader.claim(60_000, above_term=0)).term, "it leads in a store that has forgotten it"
    leader.note({}, [("event", "decided before", "detail")])
    with pytest.raises(NotLeading):
        await leader.flush()
    await link.close()
    await leader.close(resign=False)


async def test_who_waits_for_what_is_dropped_hears_that_it_is_not_stored(redis):
    leader = await journal(redis, "leader")
    await led(leader, 60_000)
    leader.note({}, [("event", "first", "detail")])
    first = asyncio.create_task(leader.flush())
    await asyncio.sleep(0)
    leader.note({}, [("event", "second", "detail")])
    second = asyncio.create_task(leader.flush())
    await asyncio.sleep(0)
    leader.forget()
    for flushed in (first, second):
        with pytest.raises(NotLeading):
            await flushed
    await leader.close(resign=False)


async def test_the_same_process_started_again_waits_for_no_lease(redis):
    before, after = await journal(redis, "leader"), await journal(redis, "leader", boot="2")
    first = await led(before, 60_000)
    assert (await after.claim(60_000, above_term=0)).term > first
    before.note({}, [("event", "subject", "detail")])
    with pytest.raises(NotLeading):
        await before.flush()
    await before.close(resign=False)
    await after.close(resign=False)
