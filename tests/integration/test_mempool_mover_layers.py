"""Copies that follow a step layer by layer: real memory, real threads, host memory only."""

import asyncio
import mmap
import os
import time

import numpy as np
import pytest

from services.mempool.mover_layers import Feed, Gate, LayerMemory, span_template
from shared.kv.layer_words import ALL_LAYERS, layer_word
from shared.vmm.words import Words
from tests.integration.test_mempool_mover import PAGE, Rig

LAYERS, LAYER_BYTES = 5, 2_469  # 5 * 2469 == PAGE
assert LAYERS * LAYER_BYTES == PAGE


@pytest.fixture
async def rig():
    made = Rig()
    for number in (1, 2):
        made.add(number)
    yield made
    made.close()


class Rank:
    """What a rank has of its layer word."""

    def __init__(self):
        self.memory = LayerMemory()
        fd = self.memory.take_fd()
        self._words = Words(mmap.mmap(fd, 4096), 1)
        os.close(fd)

    def say(self, step, layers):
        self._words.store(0, layer_word(step, layers))


def copy(rig, feed, timeout_ms=30_000):
    future = asyncio.get_running_loop().create_future()
    rig.mover.copy(1, 2, [4, 9], [(1, [7, 0])], timeout_ms, future.set_result, feed)
    return future


def layers_there(rig, rank):
    """Leading layers of the target pages that equal the source's."""
    wrote = rig.pages(2)[rank][[4, 9]] == rig.pages(1)[rank][[7, 0]]
    whole = [bool(wrote[:, i * LAYER_BYTES : (i + 1) * LAYER_BYTES].all()) for i in range(LAYERS)]
    return whole.index(False) if False in whole else LAYERS


async def reaches(condition, timeout_s=30.0):
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  the condition is another thread's state
            await asyncio.sleep(0.002)


async def test_no_layer_is_read_before_every_rank_has_written_it(rig):
    ranks = [Rank(), Rank()]
    future = copy(rig, Feed(LAYERS, LAYER_BYTES, Gate([r.memory for r in ranks], 3)))
    ranks[0].say(3, LAYERS)
    ranks[1].say(2, ALL_LAYERS)  # the step before
    await asyncio.sleep(0.05)
    assert [layers_there(rig, rank) for rank in (0, 1)] == [0, 0]
    for layer in range(1, LAYERS):
        ranks[1].say(3, layer)
        await reaches(lambda layer=layer: layers_there(rig, 0) == layers_there(rig, 1) == layer)
        await asyncio.sleep(0.005)
        assert [layers_there(rig, rank) for rank in (0, 1)] == [layer, layer]
    assert not future.done()
    ranks[1].say(4, 0)  # the next step: this one is whole
    done = await future
    assert done.ok, done
    assert done.num_bytes == 2 * 2 * PAGE
    assert [(s.first, s.last) for s in done.sent] == [(i, i + 1) for i in range(LAYERS)]
    assert all(s.begin_ns <= s.end_ns for s in done.sent)
    assert [layers_there(rig, rank) for rank in (0, 1)] == [LAYERS, LAYERS]


async def test_a_copy_that_is_behind_sends_what_is_written_in_one_piece(rig):
    rank = Rank()
    rank.say(8, 3)
    future = copy(rig, Feed(LAYERS, LAYER_BYTES, Gate([rank.memory], 8)))
    await reaches(lambda: layers_there(rig, 0) == 3)
    rank.say(9, 1)
    assert [(s.first, s.last) for s in (await future).sent] == [(0, 3), (3, 5)]


async def test_the_end_of_a_step_that_says_nothing_of_its_layers_opens_the_gate(rig):
    gate = Gate([Rank().memory], 8)
    future = copy(rig, Feed(LAYERS, LAYER_BYTES, gate))
    await asyncio.sleep(0.02)
    assert layers_there(rig, 0) == 0
    gate.is_over = True
    assert [(s.first, s.last) for s in (await future).sent] == [(0, LAYERS)]


async def test_by_request_sends_one_layer_after_the_other_without_a_gate(rig):
    done = await copy(rig, Feed(LAYERS, LAYER_BYTES))
    assert [(s.first, s.last) for s in done.sent] == [(i, i + 1) for i in range(LAYERS)]
    assert [layers_there(rig, rank) for rank in (0, 1)] == [LAYERS, LAYERS]


async def test_a_step_that_never_writes_its_layer_ends_the_copy_at_its_deadline_with_no_page_in_doubt(rig):
    rank = Rank()
    rank.say(1, 2)
    done = await copy(rig, Feed(LAYERS, LAYER_BYTES, Gate([rank.memory], 1)), timeout_ms=80)
    assert (done.code, done.quarantined) == ("transfer.timeout", ())
    again = asyncio.get_running_loop().create_future()
    rig.mover.copy(2, 2, [4, 9], [(1, [7, 0])], 60_000, again.set_result)
    assert (await again).ok


async def test_a_mempool_that_ends_does_not_wait_for_layers(rig):
    future = copy(rig, Feed(LAYERS, LAYER_BYTES, Gate([Rank().memory], 1)), timeout_ms=30_000)
    await reaches(lambda: rig.mover.status()["copies"] == 1 and not rig.mover.status()["waiting"])
    begun_s = time.monotonic()
    assert rig.mover.close()
    assert time.monotonic() - begun_s < 10, "not the copy's thirty seconds"
    assert not (await future).ok


def test_pieces_of_a_span_end_where_allocations_end():
    pieces = span_template(200, 600, 100, 250).pieces
    assert pieces.source_offsets.tolist() == [200, 250, 300, 400, 500]
    assert int(pieces.sizes.sum()) == 400
    assert np.array_equal(pieces.source_offsets, pieces.target_offsets)
