"""Two mempools on two hosts (network namespaces, a veth pair): partitions in the middle of transfers. Root only."""

import asyncio
import random
import time

import pytest

from tests.integration.peer_rig import make_pair

DETECTED_S = 2.0
SPARE_S = 5.0  # of a busy machine
NUM_BLOCKS = 96
CUTS = 5
MOST_CUTS = 20
LATEST_S = 0.06  # after the start of a transfer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
async def pair(tmp_path, hosts):
    hosts.heal()
    prefixes = (hosts.prefix(0), hosts.prefix(1))
    found = await make_pair(
        tmp_path, ("10.213.7.1", "10.213.7.2"), prefixes, quota=NUM_BLOCKS,
        **{"capacity-bytes": 4 * NUM_BLOCKS * 8192},
    )  # fmt: skip
    yield found
    await found.a.close()
    await found.b.close()


async def pull_fresh(pair, number, wait_ms=10_000):
    """Blocks that nobody has seen: how many came, after every byte of them was compared."""
    names = [f"{number}-{i}" for i in range(NUM_BLOCKS)]
    pair.hand_off(names, f"f{number}")
    got = await pair.pull(names, handoff=f"f{number}", wait_ms=wait_ms)
    if got.num_blocks:
        assert pair.b.read(got, names[: got.num_blocks]) == [True] * got.num_blocks, (
            f"wrong bytes in {number}"
        )
        pair.b.client.release(got.lease_id)
    return got.num_blocks


async def until_whole(pair, number):
    """Blocks come again; the next number."""
    until_s = time.monotonic() + 60
    while await pull_fresh(pair, number, wait_ms=3_000) < NUM_BLOCKS:
        assert time.monotonic() < until_s
        number += 1
        await asyncio.sleep(0.2)
    return number + 1


async def test_blocks_cross_the_network_and_the_path_is_used_again(pair):
    number = 0
    for _ in range(3):
        number = await until_whole(pair, number)  # a mempool that the machine stops for two seconds is a miss
    await pair.until_at_rest()


@pytest.mark.parametrize("how", ["cut", "silence"])
async def test_a_link_that_breaks_during_transfers_is_a_miss_in_2_s_no_byte_is_wrong_and_all_pages_return(
    pair, hosts, how
):
    breaks, heals = (hosts.cut, hosts.mend) if how == "cut" else (hosts.partition, hosts.heal)
    rng, number, outcomes, latest_s = random.Random(7), 0, [], LATEST_S
    number = await until_whole(pair, number)
    while len(outcomes) < CUTS or (0 not in outcomes and len(outcomes) < MOST_CUTS):
        loop = asyncio.get_running_loop()
        delay_s = rng.uniform(0, latest_s)
        pulls = asyncio.create_task(pull_fresh(pair, number))
        await asyncio.sleep(delay_s)
        await loop.run_in_executor(None, breaks)
        begun_s = time.monotonic()
        outcomes.append(await pulls)
        assert time.monotonic() - begun_s < DETECTED_S + SPARE_S, (
            "a reader was held by a network that is gone"
        )
        await pair.until_at_rest(DETECTED_S + 3 * SPARE_S)
        number += 1
        assert await pull_fresh(pair, number, wait_ms=10_000) == 0
        await loop.run_in_executor(None, heals)
        number = await until_whole(pair, number + 1)
        if outcomes[-1]:
            latest_s *= 0.7  # it came after the transfer: how long one takes differs between machines
    assert 0 in outcomes, "no break came in the middle of a transfer"
    await pair.until_at_rest()
