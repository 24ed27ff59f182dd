"""Keys of the coordinator in Redis that are not what it wrote: it leads all the same, and writes them anew."""

import pytest

from services.coordinator.config import CoordinatorSettings
from services.coordinator.market_journal import MarketJournal
from services.coordinator.shell import Coordinator
from shared.transport.clock import MonotonicClock
from shared.transport.redis_link import RedisRefused
from tests.integration import test_coordinator_journal as journals
from tests.integration import test_coordinator_journal_fence as fences
from tests.integration.test_coordinator_journal import a_disk_may_be_slow  # noqa: F401 - a fixture
from tests.support.control_plane import register, until, until_async

redis, world = journals.redis, fences.world  # fixtures
LEADER, TERM = "quire:coordinator:leader", "quire:coordinator:term"
MARKET, HISTORY, MEMBERS = (f"quire:coordinator:{name}" for name in ("market", "history", "journal"))
TYPES = {TERM: "hash", LEADER: "list", MARKET: "list", HISTORY: "hash", MEMBERS: "list"}  # wrong ones
FAR = 1 << 52  # a term above every wall clock's


async def said(link, *words):
    return await link.call(*words, timeout_ms=5_000)


async def damage(link, key):
    await said(link, "DEL", key)
    await (said(link, "HSET", key, "a", "1") if TYPES[key] == "hash" else said(link, "RPUSH", key, "1"))


@pytest.mark.parametrize("key", TYPES)
async def test_a_key_of_another_type_goes_aside_and_the_coordinator_leads_and_writes_it_anew(world, key):
    """It failed to claim once a second for ever, and said that it was ready."""
    await damage(world.link, key)
    coordinator = await fences.led(world, "one")
    await until(lambda: coordinator.lending.role() == "leader")
    coordinator.register(register(fences.P0))
    await until_async(lambda: is_stored(world))
    assert await said(world.link, "TYPE", f"{key}:damaged") == TYPES[key].encode()


async def is_stored(world):
    return fences.P0 in await fences.stored(world)


@pytest.mark.parametrize("key", TYPES)
async def test_a_key_that_is_damaged_under_a_leader_begins_a_new_term_with_what_it_knows(world, key):
    coordinator = await fences.led(world, "one")
    coordinator.register(register(fences.P0))
    await fences.until_written(coordinator)
    before = coordinator.lending.leadership.term
    await damage(world.link, key)
    await until(lambda: coordinator.lending.leadership.term > before)
    await until_async(lambda: is_stored(world))
    await until(lambda: coordinator.lending.role() == "leader")


@pytest.mark.parametrize("word", ["x", "nan", "inf", "1e999", "-1", "9" * 30, ""])
async def test_a_term_that_is_no_number_is_written_anew_above_what_the_leaders_key_says(redis, word):
    one, two = await journals.journal(redis, "one"), await journals.journal(redis, "two")
    term = (await one.claim(60_000, above_term=FAR)).term
    await said(one._link, "SET", TERM, word)
    await said(one._link, "HSET", LEADER, "until_us", 1)  # its lease is over
    after = (await two.claim(60_000, above_term=0)).term
    assert after > term > FAR
    assert int(await said(one._link, "GET", TERM)) == after
    await one.close(resign=False)
    await two.close(resign=False)


async def test_a_term_never_goes_back_below_what_its_own_process_knows(redis):
    one = await journals.journal(redis, "one")
    term = (await one.claim(60_000, above_term=FAR)).term
    for key in (TERM, LEADER):
        await said(one._link, "DEL", key)
        await said(one._link, "RPUSH", key, "1")
    assert (await one.claim(60_000, above_term=0, known_term=term)).term > term > FAR
    await one.close(resign=False)


async def test_a_lease_that_ends_far_beyond_every_lease_keeps_nobody_out(redis):
    one, two = await journals.journal(redis, "one"), await journals.journal(redis, "two")
    term = (await one.claim(60_000, above_term=0)).term
    assert not (await two.claim(60_000, above_term=0)).term
    await said(one._link, "HSET", LEADER, "until_us", "9" * 30)
    assert (await two.claim(60_000, above_term=0)).term > term
    await one.close(resign=False)
    await two.close(resign=False)


async def test_where_redis_clock_went_back_a_standby_waits_for_one_lease(redis):
    one, two = await journals.journal(redis, "one"), await journals.journal(redis, "two")
    term = (await one.claim(100, above_term=0)).term
    until_us = int(await said(one._link, "HGET", LEADER, "until_us"))
    await said(one._link, "HSET", LEADER, "until_us", until_us + 1_800_000_000)

    async def leads():
        return (await two.claim(100, above_term=0)).term > term

    assert not await leads()
    await until_async(leads)
    await one.close(resign=False)
    await two.close(resign=False)


async def test_a_leader_of_before_that_says_no_length_of_its_lease_keeps_it(redis):
    one, two = await journals.journal(redis, "one"), await journals.journal(redis, "two")
    term = (await one.claim(60_000, above_term=0)).term
    await said(one._link, "HDEL", LEADER, "lease_us")
    for _ in range(2):
        assert not (await two.claim(60_000, above_term=0)).term
    assert (await one.claim(60_000, above_term=0, known_term=term)).term == term
    await one.close(resign=False)
    await two.close(resign=False)


async def test_a_coordinator_whose_claims_fail_says_so_in_words_and_logs_it_once(world, monkeypatch):
    claims = 0

    async def refused(*_, **__):
        nonlocal claims
        claims += 1
        raise RedisRefused("NOPERM no permission")

    logged = []
    monkeypatch.setattr(MarketJournal, "claim", refused)
    monkeypatch.setattr(
        "services.coordinator.market_shell._log.warning", lambda event, **_: logged.append(event)
    )
    settings = CoordinatorSettings(redis_url=world.redis.url, leader_lease_ms=60, journal_wait_ms=1)
    coordinator = Coordinator(settings, MonotonicClock(), url="http://one")
    await coordinator.start()
    world.opened.append(coordinator)
    await until(lambda: claims > 3)
    _, details = coordinator.readiness()
    assert details["role"] == "unknown"
    assert details["problem"] == "NOPERM no permission"
    assert logged.count("claim_failed") == 1
