"""Which end keeps what: blocks that decode completes are in prefill's space before anybody asks, in mode 3 alone."""

import pytest

from services.mempool.core.claims import SPARE_PART
from services.mempool.core.pull import ASK_AGAIN_MS, SPARE_WITHIN_MS
from shared.ids import HandoffId
from shared.kv.words import u32_bytes
from shared.wire import mempool as wire
from tests.unit.mempool_harness import BLOCK_TOKENS, PAGE_BYTES, SEED, chain, page_lists
from tests.unit.test_mempool_spaces import DECODE, FRONT, PREFILL, Spaces, acquire, answers

ABC, MORE = chain("a", "b", "c"), chain("a", "b", "c", "d", "e")
PREFILL_FRONT = 9


def handed_over(
    mode: str, *, prompt: list = ABC, quota: int = 4, decode_quota: int = 4, **limits: object
) -> Spaces:
    """Decode has the prompt's blocks."""
    rig = Spaces(max(8, 2 * decode_quota), pd_caching=mode, **limits)
    rig.worker(PREFILL, "cpu:0", quota=quota)
    rig.worker(DECODE, "cpu:1", quota=decode_quota)
    rig.client(FRONT, f"i{DECODE}")
    rig.client(PREFILL_FRONT, f"i{PREFILL}")
    rig.fill(PREFILL, 0, prompt, "abc"[: len(prompt)])
    ready = wire.HandoffReady(handoff_id=HandoffId("h"), hashes=b"".join(prompt), ttl_ms=10_000)
    rig.say(PREFILL, ready)
    acquire(rig, prompt, handoff_id=HandoffId("h"), wait_ms=1_000, traceparent="trace-1")
    rig.copied()
    assert answers(rig, FRONT, wire.Acquired)[0].num_blocks == len(prompt)
    return rig


def decode_seals(rig: Spaces, hashes: list, first: int, names: str) -> list:
    pages = rig.take(DECODE, len(names))
    rig.write(DECODE, pages)
    rig.seal(DECODE, pages, hashes, first)
    rig.bytes.update({(1, page): name for (page, _), name in zip(pages, names, strict=True)})
    return pages


def test_what_decode_completes_goes_back_at_once():
    rig = handed_over("3")
    decode_seals(rig, MORE, 3, "d")
    (copy,) = rig.copies.values()
    assert (copy.space, [space for space, _ in copy.sources]) == (0, [1])
    rig.copied()
    decode_seals(rig, MORE, 4, "e")
    rig.copied()
    here = rig.core.pools[0].index.prefix(MORE)
    assert [rig.bytes[0, entry.page] for entry in here] == list("abcde")
    assert rig.core.status().counters["blocks_pushed_back"] == 2
    assert not answers(rig, PREFILL, wire.Shrink), "no engine is asked for anything"
    rig.counts()


def test_what_goes_back_is_in_the_trace_of_the_request_that_decode_took_it_for():
    rig = handed_over("3", decode_quota=8)
    decode_seals(rig, MORE, 3, "de")
    (copy,) = rig.copies.values()
    assert copy.returns == {"trace-1": 2}
    rig.copied()
    rig.say(PREFILL_FRONT, wire.Acquire(call_id=5, hashes=b"".join(chain("x")), traceparent="trace-2"))
    assert not any(copy.returns for copy in rig.copies.values())


def test_the_block_in_which_the_prompt_ends_goes_back_when_decode_has_completed_it():
    rig = Spaces(pd_caching="3")
    rig.worker(PREFILL, "cpu:0")
    rig.worker(DECODE, "cpu:1")
    rig.client(FRONT, f"i{DECODE}")
    tail = chain("a", "tail")
    pages = rig.take(PREFILL, 2)
    rig.say(
        PREFILL,
        wire.Sealed(
            **page_lists(pages), hashes=b"".join(tail), parents=SEED + tail[0],
            valid_tokens=u32_bytes([BLOCK_TOKENS, 1]),
        ),
    )  # fmt: skip
    rig.say(PREFILL, wire.HandoffReady(handoff_id=HandoffId("h"), hashes=b"".join(tail), ttl_ms=10_000))
    acquire(rig, tail, handoff_id=HandoffId("h"), wait_ms=1_000)
    rig.copied()
    decode_seals(rig, MORE, 1, "b")
    rig.copied()
    assert MORE[1] in rig.core.pools[0].index


@pytest.mark.parametrize("mode", ["basic", "1", "2"])
def test_in_the_other_modes_nothing_goes_back_and_prefill_reads_nothing_of_decodes(mode):
    rig = handed_over(mode)
    decode_seals(rig, MORE, 3, "d")
    assert not rig.copies
    rig.say(PREFILL_FRONT, wire.Acquire(call_id=5, hashes=b"".join(MORE)))
    assert answers(rig, PREFILL_FRONT, wire.Acquired)[0].num_blocks == 3
    rig.say(PREFILL_FRONT, wire.Match(call_id=6, hashes=b"".join(MORE)))
    assert answers(rig, PREFILL_FRONT, wire.Matched)[0].num_blocks == 3


def test_what_is_not_behind_a_handed_over_chain_stays():
    rig = handed_over("3")
    decode_seals(rig, chain("x"), 0, "x")
    assert not rig.copies


def test_where_every_free_page_is_in_the_engines_stock_it_goes_back_into_one_of_them():
    rig = handed_over("3", quota=8, stock_share=0.25)
    pool = rig.core.pools[0]
    assert (pool.num_at_hand, pool.num_spare) == (0, 5)
    decode_seals(rig, MORE, 3, "de")
    assert answers(rig, PREFILL, wire.Shrink) == [wire.Shrink(count=1)], "a quarter of those"
    rig.give_back(PREFILL, rig.take(PREFILL, 1))
    rig.copied()
    assert [rig.bytes[0, entry.page] for entry in pool.index.prefix(MORE)] == list("abcd")
    assert rig.core.status().counters["push_backs_dropped"] == 1
    assert pool.index.get(MORE[3]) is not None, "nor does the engine get a page for it"
    rig.counts()


def test_while_engines_have_pages_to_spare_what_goes_back_evicts_nothing_that_came_back():
    rig = handed_over("3", quota=16, decode_quota=8, stock_share=0.25)
    pool, names = rig.core.pools[0], "defgh"
    long = chain("a", "b", "c", *names)
    for at, name in enumerate(names, 3):
        decode_seals(rig, long, at, name)
        for ask in answers(rig, PREFILL, wire.Shrink)[at - 3 :]:
            rig.give_back(PREFILL, rig.take(PREFILL, ask.count))
        rig.copied()
    assert [rig.bytes[0, entry.page] for entry in pool.index.prefix(long)] == list("abc" + names)
    assert pool.counters["pages_evicted"] == 0
    rig.counts()


def test_no_more_goes_back_at_once_than_a_quarter_of_the_spare_pages():
    rig = handed_over("3", quota=16, decode_quota=8, stock_share=0.25)
    assert (rig.core.pools[0].num_at_hand, rig.core.pools[0].num_spare) == (0, 13)
    long = chain("a", "b", "c", *"defg")
    for at, name in enumerate("defg", 3):
        decode_seals(rig, long, at, name)
    assert len(rig.core.pulls.pulls) == 3
    assert rig.core.status().counters["push_backs_dropped"] == 1


def test_for_what_goes_back_an_engine_is_asked_for_a_quarter_of_its_stock_though_more_is_cached_that_nobody_uses():
    """Under blocks that it caches these cannot be evicted: it gave its stock, and let go of cached blocks."""
    rig = handed_over("3", quota=16, decode_quota=8, stock_share=0.25)
    pool, long = rig.core.pools[0], chain("a", "b", "c", *range(9))
    for at in range(3, 7):
        decode_seals(rig, long, at, "z")
        rig.give_back(PREFILL, rig.take(PREFILL, 1))
        rig.copied()
    pages = rig.take(PREFILL, 1)
    rig.write(PREFILL, pages)
    rig.seal(PREFILL, pages, [*long[:7], *chain("next turn")], first=7)
    assert (pool.num_at_hand, pool.index.can_evict, len(rig.granted[PREFILL])) == (4, False, 8)
    num_asked = len(answers(rig, PREFILL, wire.Shrink))
    decode_seals(rig, [*long[:7], *chain(*"wxyz")], 7, "wxyz")
    assert answers(rig, PREFILL, wire.Shrink)[num_asked:] == [wire.Shrink(count=8 // SPARE_PART)]


def test_nothing_leaves_for_host_memory_while_an_engine_can_spare_pages():
    dram = {"dram_bytes": 16 * PAGE_BYTES, "dram_for_host": True}
    rig = handed_over("3", quota=16, decode_quota=8, stock_share=0.25, **dram)
    decode_seals(rig, MORE, 3, "d")
    rig.give_back(PREFILL, rig.take(PREFILL, 1))
    rig.copied()
    assert rig.core.pools[0].num_at_hand == 1
    decode_seals(rig, MORE, 4, "e")
    assert not rig.copies
    rig.give_back(PREFILL, rig.take(PREFILL, 1))
    assert [copy.space for copy in rig.copies.values()] == [0]


def test_what_an_engine_that_stands_still_was_to_spare_is_evicted_for_a_reader_in_its_stead():
    rig = handed_over("3", quota=16, decode_quota=8, stock_share=0.25)
    pool = rig.core.pools[0]
    decode_seals(rig, MORE, 3, "d")
    rig.give_back(PREFILL, rig.take(PREFILL, 1))
    rig.copied()
    assert pool.index.get(MORE[3]) is not None
    fill_decode(rig, chain("x"), "x")
    rig.say(PREFILL_FRONT, wire.Acquire(call_id=5, hashes=b"".join(chain("x")), wait_ms=1_000))
    assert not rig.copies
    rig.advance(ASK_AGAIN_MS)
    rig.copied()
    assert answers(rig, PREFILL_FRONT, wire.Acquired)[0].num_blocks == 1
    assert pool.index.get(MORE[3]) is None
    rig.counts()


def test_what_goes_back_makes_way_to_a_reader_of_other_blocks():
    rig = handed_over("3", quota=8)
    fill_decode(rig, chain("x", "y"), "xy")
    decode_seals(rig, MORE, 3, "d")
    assert len(rig.core.pulls.pulls) == 1
    rig.say(PREFILL_FRONT, wire.Acquire(call_id=5, hashes=b"".join(chain("x", "y"))))
    assert [pull.is_push for pull in rig.core.pulls.pulls.values()] == [False]
    rig.give_back(PREFILL, rig.take(PREFILL, 2))
    rig.copied()
    assert answers(rig, PREFILL_FRONT, wire.Acquired)[0].num_blocks == 2
    rig.counts()


def fill_decode(rig: Spaces, hashes: list, names: str) -> None:
    for at, name in enumerate(names):
        decode_seals(rig, hashes, at, name)


def test_of_an_engine_that_gives_no_page_it_stays_and_is_read_when_it_is_wanted():
    rig = handed_over("3", quota=8)
    decode_seals(rig, MORE, 3, "d")
    assert not rig.copies
    rig.advance(SPARE_WITHIN_MS)
    assert not rig.core.pulls.pulls
    rig.say(PREFILL_FRONT, wire.Acquire(call_id=5, hashes=b"".join(MORE)))
    rig.give_back(PREFILL, rig.take(PREFILL, 1))
    rig.copied()
    assert answers(rig, PREFILL_FRONT, wire.Acquired)[0].num_blocks == 4


def test_a_reader_that_comes_while_it_is_on_its_way_waits_for_it_and_for_the_rest():
    rig = handed_over("3")
    decode_seals(rig, MORE, 3, "d")
    decode_seals(rig, MORE, 4, "e")
    rig.say(PREFILL_FRONT, wire.Acquire(call_id=5, hashes=b"".join(MORE)))
    assert not answers(rig, PREFILL_FRONT, wire.Acquired)
    for _ in range(3):
        rig.copied()
    assert answers(rig, PREFILL_FRONT, wire.Acquired)[0].num_blocks == 5
    rig.counts()


def test_no_more_than_a_few_copies_are_on_their_way_and_a_failed_one_frees_its_place():
    rig = handed_over("3", decode_quota=12)
    long = chain("a", "b", "c", *range(8))
    for at in range(3, 10):
        decode_seals(rig, long, at, "z")
    assert len(rig.copies) == 4
    rig.copied(failed=True)
    assert len(rig.copies) == 1, "the three that waited go together"
    rig.copied()
    assert rig.core.status().counters["blocks_pushed_back"] == 3
    rig.counts()
