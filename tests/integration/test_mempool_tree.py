"""A mempool process, engine processes and a real Redis: who holds what is found there, also after an engine's death."""

import asyncio

import pytest

from services.mempool.tree import TreePublishers
from shared.ids import InstanceId
from shared.prompttree.client import PromptTreeClient
from shared.prompttree.publisher import PromptTreePublisher
from shared.wire.placement import PrefixHit
from tests.integration.mempool_rig import EngineProcess, MempoolProcess, PatientClient, chain
from tests.support.control_plane import until, until_async
from tests.unit.test_mempool_dram import ABCD, spaces, two_prompts
from tests.unit.test_mempool_spaces import PREFILL
from tests.unit.test_mempool_tree import leaves

BLOCK_TOKENS = 4


@pytest.fixture
def mempool(tmp_path, redis):
    process = MempoolProcess(tmp_path, **{"redis-url": redis.url})
    yield process
    process.stop()


@pytest.fixture
async def tree(redis):
    client = PromptTreeClient(redis.url, deadline_ms=10_000)
    client.open()
    assert await client.wait_up(30_000)
    yield client
    await client.close()


async def found_soon(tree, hashes, wanted, within_s=30.0):
    seen = []

    async def as_wanted():
        seen[:] = await tree.lookup(hashes, BLOCK_TOKENS)
        return seen == wanted

    try:
        await until_async(as_wanted, within_s)
    except AssertionError:
        raise AssertionError(f"{seen}, not {wanted}") from None


async def test_blocks_are_found_while_their_engine_lives_after_its_death_and_until_they_are_deleted(
    mempool, tree
):
    prompt = chain("a", "b", "c", "d")
    hit = PrefixHit(InstanceId("prefill-0"), 3 * BLOCK_TOKENS, "dram")  # this engine copies
    engine = EngineProcess(mempool.socket, "prefill-0")
    await asyncio.to_thread(engine.do, "save", "a", "b", "c")
    await found_soon(tree, prompt, [hit])
    engine.kill()
    await asyncio.sleep(0.3)
    assert await tree.lookup(prompt, BLOCK_TOKENS) == [hit]
    client = PatientClient(mempool.socket, InstanceId("prefill-0"))
    client.start()
    assert await client.wait_connected(30_000)
    assert await client.delete(prompt[2:]) == 1
    await found_soon(tree, prompt, [PrefixHit(InstanceId("prefill-0"), 2 * BLOCK_TOKENS, "dram")])
    await client.close()
    assert mempool.terminate() == 0
    await found_soon(tree, prompt, [])


async def test_an_instance_that_lives_on_another_host_has_what_it_publishes_and_not_what_it_left(
    tree, redis, opened
):
    name, rig, own = InstanceId(f"i{PREFILL}"), spaces(), chain("own", "too")
    two_prompts(rig)
    old_host = TreePublishers(redis.url, "m", "here:1", rig.core)
    opened.append(old_host)
    old_host.open()
    left = [PrefixHit(name, 4 * BLOCK_TOKENS)]
    await found_soon(tree, ABCD, left)
    leaves(rig)
    elsewhere = PromptTreePublisher(redis.url, owner=name, epoch=7, row="prefill", ttl_s=30, beat_ms=100)
    opened.append(elsewhere)
    elsewhere.stored(own)
    elsewhere.open()
    await until(lambda: elsewhere.in_sync and not elsewhere.covered)
    assert await tree.lookup(own, BLOCK_TOKENS) == [PrefixHit(name, 2 * BLOCK_TOKENS)]
    assert await tree.lookup(ABCD, BLOCK_TOKENS) == []
    await elsewhere.close()
    await found_soon(tree, ABCD, left)  # what is left is fetched under its name


async def test_a_wiped_redis_learns_again_what_the_spaces_hold(mempool, tree, redis):
    prompt = chain("a", "b")
    hit = PrefixHit(InstanceId("prefill-0"), 2 * BLOCK_TOKENS, "dram")
    engine = EngineProcess(mempool.socket, "prefill-0")
    await asyncio.to_thread(engine.do, "save", "a", "b")
    await found_soon(tree, prompt, [hit])
    redis.kill()
    assert await tree.lookup(prompt, BLOCK_TOKENS) == []
    assert mempool.status()["pages_by_state"]["sealed"] == 2  # nothing waits for Redis
    redis.start()
    await found_soon(tree, prompt, [hit], 60.0)
    engine.kill()
