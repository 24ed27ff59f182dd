"""The prompt tree through a real server: who may write what an owner holds, and when that ends."""

import asyncio
import time

import pytest

from shared.prompttree import publisher
from shared.prompttree.hits import pack_audience
from shared.prompttree.scripts import BEAT, CLAIM, NONE_BEHIND, OWNERS, RELEASE, SPACES, WRITE
from shared.transport.redis_link import RedisLink
from tests.support.control_plane import until, until_async
from tests.support.prompttree_rig import (
    BLOCK_TOKENS,
    PATIENCE_MS,
    chain,
    depths,
    make_client,
    make_publisher,
    published,
)
from tests.support.quickest import ever


@pytest.fixture(autouse=True)
def patient_publishers(monkeypatch):
    """Who take no busy machine for a Redis that does not answer."""
    monkeypatch.setattr(publisher, "CALL_DEADLINE_MS", 30_000)


async def test_a_new_epoch_ends_the_old_entries_and_silences_the_old_process(redis, opened):
    client = await make_client(redis, opened)
    stale = []
    old = make_publisher(redis, opened, epoch=5, on_stale=lambda: stale.append(True))
    await published(old, *chain(40))
    new = make_publisher(redis, opened, epoch=6)
    await published(new, *chain(3))
    assert await depths(client, chain(40), BLOCK_TOKENS) == {"p0": 3 * BLOCK_TOKENS}
    old.stored(chain(9, b"late"))
    await until(lambda: stale)
    assert old.stale
    assert await depths(client, chain(9, b"late"), BLOCK_TOKENS) == {}
    assert await depths(client, chain(40), BLOCK_TOKENS) == {"p0": 3 * BLOCK_TOKENS}
    link = RedisLink(redis.url)
    opened.append(link)
    link.open()
    await link.wait_up(PATIENCE_MS)
    assert len(await link.call("KEYS", "quire:pt:held:*", timeout_ms=PATIENCE_MS)) == 1  # the old set is gone


async def test_a_process_with_an_older_epoch_cannot_claim(redis, opened):
    client = await make_client(redis, opened)
    await published(make_publisher(redis, opened, epoch=6), *chain(3))
    late = make_publisher(redis, opened, epoch=5)
    late.stored(chain(40))
    await until(lambda: late.stale)
    assert await depths(client, chain(40), BLOCK_TOKENS) == {"p0": 3 * BLOCK_TOKENS}


async def test_a_renewed_epoch_publishes_everything_again(redis, opened):
    client = await make_client(redis, opened)
    publisher = make_publisher(redis, opened, epoch=5)
    await published(publisher, *chain(40))
    publisher.renew(8)
    await until(lambda: publisher.held.num_claims >= 2 and publisher.in_sync)
    assert await depths(client, chain(40), BLOCK_TOKENS) == {"p0": 40 * BLOCK_TOKENS}
    with pytest.raises(ValueError, match="below"):
        publisher.renew(7)


async def test_an_orderly_end_withdraws_and_a_silent_one_expires(redis, opened):
    client = await make_client(redis, opened)
    leaving = make_publisher(redis, opened, "leaving")
    dying = make_publisher(redis, opened, "dying", ttl_s=1, beat_ms=100)
    await published(leaving, *chain(4))
    await published(dying, *chain(4))

    async def are(*names):
        return set(await depths(client, chain(4), BLOCK_TOKENS)) == set(names)

    async def is_kept():
        await until_async(lambda: are("leaving", "dying"))
        num_claims = dying.held.num_claims
        await asyncio.sleep(1.2)  # longer than its TTL: the beats keep it
        return await are("leaving", "dying") and dying.held.num_claims == num_claims

    assert await ever(is_kept)
    await leaving.close()
    await until_async(lambda: are("dying"))
    dying._task.cancel()
    deadline = time.monotonic() + 30
    while await depths(client, chain(4), BLOCK_TOKENS):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_rows_of_dead_owners_are_dropped_by_the_living(redis, opened):
    link = RedisLink(redis.url)
    opened.append(link)
    link.open()
    await link.wait_up(PATIENCE_MS)
    await link.call("HSET", "quire:pt:owners", "ghost", "00000000000000aa 7 prefill", timeout_ms=PATIENCE_MS)
    await published(make_publisher(redis, opened, beat_ms=50, ttl_s=5), *chain(4))
    deadline = time.monotonic() + 30
    while await link.call("HEXISTS", "quire:pt:owners", "ghost", timeout_ms=PATIENCE_MS):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("gone", ["swept", "released"])
async def test_an_older_process_cannot_claim_after_the_row_of_the_newer_one_is_gone(redis, opened, gone):
    client = await make_client(redis, opened)
    newer = make_publisher(redis, opened, epoch=6, ttl_s=1, beat_ms=100)
    await published(newer, *chain(3))
    if gone == "released":
        await newer.close()
    else:
        newer._task.cancel()
    living = make_publisher(redis, opened, "living", beat_ms=50, ttl_s=5)
    await published(living, *chain(2))
    deadline = time.monotonic() + 30
    while await living._link.call("HEXISTS", "quire:pt:owners", "p0", timeout_ms=PATIENCE_MS):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    late = make_publisher(redis, opened, epoch=5)
    late.stored(chain(40))
    await until(lambda: late.stale or late.in_sync)
    assert late.stale
    assert await depths(client, chain(40), BLOCK_TOKENS) == {"living": 2 * BLOCK_TOKENS}
    await published(make_publisher(redis, opened, epoch=7), *chain(4))
    assert (await depths(client, chain(40), BLOCK_TOKENS))["p0"] == 4 * BLOCK_TOKENS


async def make_link(redis, opened):
    link = RedisLink(redis.url)
    opened.append(link)
    link.open()
    await link.wait_up(PATIENCE_MS)
    return link


@pytest.mark.parametrize("during", [CLAIM, WRITE, BEAT], ids=["claim", "write", "beat"])
async def test_a_process_that_got_a_larger_epoch_meanwhile_is_not_ended_by_an_answer_to_the_old_one(
    redis, opened, during, monkeypatch
):
    client, link = await make_client(redis, opened), await make_link(redis, opened)
    stale = []
    beat_ms = 100 if during is BEAT else 30_000
    publisher = make_publisher(redis, opened, epoch=1, beat_ms=beat_ms, on_stale=lambda: stale.append(True))
    if during is not CLAIM:
        await published(publisher, *chain(3))
    ask, verdicts = publisher._call, []

    async def renewed_before_the_answer(script, *args):
        reply = await ask(script, *args)
        if script is during and reply == b"stale":
            verdicts.append(reply)
            publisher.renew(3)
        return reply

    monkeypatch.setattr(publisher, "_call", renewed_before_the_answer)
    claim = (OWNERS, "p0", 2, "f" * 16, 120, "prefill")
    assert await link.run(CLAIM, *claim, timeout_ms=PATIENCE_MS) == b"ok"
    if during is not BEAT:
        publisher.stored(chain(4))
    await until(lambda: verdicts and (publisher.in_sync or publisher.stale))
    assert verdicts == [b"stale"]
    assert not publisher.stale
    assert not stale
    num_blocks = 3 if during is BEAT else 4
    assert await depths(client, chain(8), BLOCK_TOKENS) == {"p0": num_blocks * BLOCK_TOKENS}


async def test_an_older_process_cannot_claim_after_a_newer_one_for_which_a_space_spoke(redis, opened):
    link = await make_link(redis, opened)

    async def run(script, *args):
        return await link.run(script, *args, timeout_ms=PATIENCE_MS)

    audience = f"{NONE_BEHIND} {pack_audience({'p0': 'hbm'})}"
    assert await run(CLAIM, SPACES, "pool/0", 1, "a" * 16, 120, audience) == b"ok"
    assert await run(CLAIM, OWNERS, "p0", 7, "b" * 16, 120, "prefill") == b"covered"
    assert await run(RELEASE, SPACES, "pool/0", 1, "a" * 16) == b"ok"
    assert await run(CLAIM, OWNERS, "p0", 6, "c" * 16, 120, "prefill") == b"stale"
    assert await run(CLAIM, OWNERS, "p0", 7, "d" * 16, 120, "prefill") == b"ok"
