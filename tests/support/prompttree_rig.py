"""Publishers and clients of a prompt tree in a real server, for tests."""

from shared.kv.block_hash import chain_seed, hash_blocks, pack_tokens
from shared.prompttree.client import PromptTreeClient
from shared.prompttree.publisher import PromptTreePublisher
from tests.support.control_plane import until

BLOCK_TOKENS = 32
PATIENCE_MS = 30_000


def chain(num_blocks, seed=b"x"):
    return hash_blocks(chain_seed(seed.decode(), ""), pack_tokens(range(num_blocks)), 1)


async def depths(client, hashes, block_tokens):
    """Of every instance, of what it holds itself."""
    return {hit.instance: hit.tokens for hit in await client.lookup(hashes, block_tokens)}


async def make_client(redis, opened, *, deadline_ms=PATIENCE_MS, **more):
    """Patient, where the test is not about time: other processes have the machine too."""
    client = PromptTreeClient(redis.url, deadline_ms=deadline_ms, **more)
    opened.append(client)
    client.open()
    assert await client.wait_up(PATIENCE_MS)
    return client


def make_publisher(redis, opened, name="p0", epoch=1, **more):
    publisher = PromptTreePublisher(redis.url, owner=name, epoch=epoch, row="prefill", **more)
    opened.append(publisher)
    publisher.open()
    return publisher


async def published(publisher, *hashes):
    publisher.stored(hashes)
    await until(lambda: publisher.in_sync)
