"""Leased blocks in the pool of an engine: found as vLLM finds them, forgotten whole, and not block by block in vLLM."""

import hashlib
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.block_pool import BlockPool

from shared.engine import page_pool
from shared.engine.page_pool import PageBlockPool
from shared.engine.page_swaps import LEASED, SEALED, STOCK, UNKNOWN
from shared.ids import BlockHash
from shared.kv.words import u32_list
from shared.mempool import give_parts

NUM_BLOCKS, BLOCK_TOKENS = 64, 32
HASHES = [BlockHash(hashlib.sha256(bytes([i])).digest()) for i in range(8)]
PAGES, EPOCHS = list(range(10, 18)), [7] * 8


class Quota:
    """Grants nothing, hears everything."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()

        self.unpinned: list[list[tuple[int, int]]] = []
        self.given_back: list[tuple[int, int]] = []
        self.parts: list[int] = []
        self.shrink = self.answered = 0

    def unpin(self, pages: list) -> None:
        self.unpinned.append(list(pages))

    def take_granted(self) -> list:
        return []

    def take_shrink(self, most: int | None = None) -> int:
        count = self.shrink if most is None else min(most, self.shrink)
        self.shrink -= count
        return count

    def take_uncache(self) -> int:
        return 0

    def take_vacates(self) -> tuple[list, list]:
        return [], []

    def give_back(self, pages: list, answers: int = 0) -> None:
        self.given_back += pages
        self.parts.append(len(pages))
        self.answered += answers


@pytest.fixture
def said() -> list[tuple[str, list[BlockHash]]]:
    return []


@pytest.fixture
def pool(said: list) -> PageBlockPool:
    return PageBlockPool(Quota(), lambda *event: said.append(event), NUM_BLOCKS, True, BLOCK_TOKENS)  # type: ignore[arg-type]


def found(pool: PageBlockPool) -> list[int]:
    """Block ids of the hits, by both look-ups."""
    hashes: list[Any] = list(HASHES)  # vLLM has a name of its own for the type
    ours = [pool.get_cached_block(h, [0]) for h in hashes]
    assert ours == [BlockPool.get_cached_block(pool, h, [0]) for h in hashes]
    return [each[0].block_id for each in ours if each is not None]


def test_leased_blocks_are_hits_until_their_last_lease_ends_and_leave_nothing(pool, said):
    first = pool.lease(PAGES, EPOCHS, HASHES)
    second = pool.lease(PAGES[:5], EPOCHS[:5], HASHES[:5])
    assert found(pool) == [page + 1 for page in PAGES]
    assert [block.ref_cnt for block in first] == [2] * 5 + [1] * 3
    assert pool.may_unlease(first)
    pool.unlease(first)
    assert found(pool) == [page + 1 for page in PAGES[:5]]
    assert said == [("removed", HASHES[:4:-1])]
    pool.unlease(second)
    assert found(pool) == []
    assert not pool.lease_counts
    assert not pool.kinds.count(LEASED)
    assert all(block.ref_cnt == 0 and block.block_hash is None for block in first)
    assert said[1:] == [("removed", HASHES[4::-1])]


def test_a_block_that_another_request_uses_without_a_lease_keeps_the_lease(pool):
    blocks = pool.lease(PAGES, EPOCHS, HASHES)
    pool.touch(blocks[:1])
    assert not pool.may_unlease(blocks)
    pool.free_blocks(blocks[:1])
    assert pool.may_unlease(blocks)
    pool.unlease(blocks)
    assert pool.kinds[PAGES[0] + 1] == UNKNOWN


def test_pages_behind_one_that_is_another_by_now_are_not_used(pool):
    pool.unlease(pool.lease(PAGES, EPOCHS, HASHES))
    kept = pool.lease(PAGES[3:4], [9], HASHES[3:4])
    assert len(pool.lease(PAGES, EPOCHS, HASHES)) == 3
    assert len(pool.lease([*PAGES[4:6], NUM_BLOCKS], EPOCHS[:3], HASHES[4:7])) == 2, "there is no such page"
    assert kept[0].ref_cnt == 1


def test_a_lease_takes_no_call_of_vllms_for_each_block(pool, monkeypatch):
    """A prompt of 32K tokens has a thousand of them, and its client waits."""

    def never(*_: object) -> None:
        raise AssertionError("called for a block")

    for name in ("_insert_block_hash", "_maybe_evict_cached_block", "touch"):
        monkeypatch.setattr(pool, name, never)
    pool.unlease(pool.lease(PAGES, EPOCHS, HASHES))
    assert found(pool) == []


def cached(pool: PageBlockPool) -> None:
    """This engine's own sealed blocks, which no request uses."""
    blocks = pool.lease(PAGES, EPOCHS, HASHES)
    for block in blocks:
        block.ref_cnt = 0
        pool.kinds[block.block_id] = SEALED
    pool.lease_counts.clear()
    pool.num_owned = len(blocks)
    pool.free_block_queue.append_n(blocks)


def test_the_mempool_hears_of_pages_that_it_asked_for_while_the_next_blocks_are_dropped(
    pool, said, monkeypatch
):
    monkeypatch.setattr(page_pool, "EVICT_PART", 3)
    cached(pool)
    pool.quota.shrink = 7
    pool.absorb()
    assert [[page for page, _ in part] for part in pool.quota.unpinned] == [PAGES[:3], PAGES[3:6], PAGES[6:7]]
    assert said == [("removed", HASHES[:3]), ("removed", HASHES[3:6]), ("removed", HASHES[6:7])]
    assert found(pool) == [PAGES[7] + 1]
    assert (pool.num_owned, pool.num_expected) == (1, 0)


def test_blocks_leave_the_cache_as_by_vllm_without_a_call_of_its_for_each(pool, said, monkeypatch):
    cached(pool)
    twice = pool.blocks[1]  # another block of the same hash stays
    pool.cached_block_hash_to_block.insert(pool.blocks[PAGES[2] + 1].block_hash, twice)
    by_vllm = pool.blocks[PAGES[4] + 1]  # which knows it under two hashes
    pool.cached_block_hashes_by_block[by_vllm.block_id] = []
    pool.blocks[PAGES[5] + 1].reset_hash()
    calls: list[int] = []
    vllms = pool._maybe_evict_cached_block
    monkeypatch.setattr(pool, "_maybe_evict_cached_block", lambda b: calls.append(b.block_id) or vllms(b))
    pool.uncache([pool.blocks[page + 1] for page in PAGES])
    pool.tell_removed()
    assert calls == [PAGES[4] + 1, PAGES[5] + 1]
    assert all(pool.blocks[page + 1].block_hash is None for page in PAGES)
    assert said == [("removed", [HASHES[i] for i in (0, 1, 3, 4, 6, 7)])], "one of them is still there"
    assert pool.get_cached_block(HASHES[2], [0]) == [twice]


def test_the_mempool_hears_of_empty_pages_in_parts_and_fills_the_first_meanwhile(pool, monkeypatch):
    monkeypatch.setattr(give_parts, "FIRST_PART", 2)
    monkeypatch.setattr(give_parts, "LARGEST_PART", 3)
    in_stock(pool, 8)
    pool.quota.shrink = 7
    pool.absorb()
    assert (pool.quota.parts, pool.quota.answered) == ([2, 3, 2], 7)
    assert sorted(page for page, _ in pool.quota.given_back) == list(range(30, 37)), "one stays"
    pool.quota.shrink = 1
    pool.give_spare()
    assert (pool.quota.parts, pool.quota.answered) == ([2, 3, 2, 1], 8)


def in_stock(pool: PageBlockPool, count: int) -> None:
    """So many empty pages from 29 on."""
    pool.stock.extend(pool.blocks[30 : 30 + count])
    for block in pool.stock:
        pool.kinds[block.block_id] = STOCK
    pool.num_owned += count


def test_beside_a_step_only_empty_pages_are_given_back(pool):
    cached(pool)
    in_stock(pool, 3)
    pool.quota.shrink = 5
    pool.give_spare()
    assert sorted(page for page, _ in pool.quota.given_back) == [29, 30, 31]
    assert (pool.quota.shrink, pool.quota.unpinned, pool.quota.answered) == (2, [], 3)
    pool.absorb()
    assert [page for part in pool.quota.unpinned for page, _ in part] == PAGES[:2]
    assert pool.quota.answered == 5
    pool.quota.shrink = 100
    pool.absorb()
    assert pool.quota.answered == 105, "though it had fewer"


def test_the_mempools_successor_hears_what_is_in_stock_and_then_of_each_page_that_a_step_writes(pool):
    pool.stock.extend(pool.blocks[30:33])
    for block in pool.stock:
        pool.kinds[block.block_id] = STOCK
    pool.num_owned += 3
    writing, aborted = pool.get_new_blocks(2)
    pool.free_blocks([aborted])
    pool._written.clear()  # the mempool knew of both, and is lost
    held = pool.holding([])
    assert held.num_unwritten == 2
    assert u32_list(held.pages) == [aborted.block_id - 1, 31, writing.block_id - 1]
    assert pool.get_new_blocks(2)[0] is aborted
    assert [page for page, _ in pool._written] == [aborted.block_id - 1, 31]
