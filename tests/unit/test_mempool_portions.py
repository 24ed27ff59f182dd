"""A large copy for a reader goes in portions: each begins when its pages are here, and the reader hears once."""

import pytest

from services.mempool.core.actions import CopyPages
from services.mempool.core.lending_copies import LendingCopies
from services.mempool.core.loans import Shelf
from services.mempool.core.page_table import PageTable
from services.mempool.core.pull import LARGEST
from shared.ids import Epoch, PageId
from shared.kv.page import PageState
from shared.kv.words import u32_list
from shared.wire import mempool as wire
from tests.unit.mempool_harness import PAGE_BYTES, chain
from tests.unit.test_mempool_spaces import DECODE, FRONT, PREFILL, Spaces, acquire, answers

NAMES = "abcdef"
PROMPT = chain(*NAMES)


@pytest.fixture
def pair() -> Spaces:
    """The decode side's engine has half of its space's eight pages; a portion is two."""
    spaces = Spaces(portion_bytes=2 * PAGE_BYTES, pull_patience_ms=400)
    spaces.worker(PREFILL, "cpu:0", quota=6)
    spaces.worker(DECODE, "cpu:1", quota=4)
    spaces.client(FRONT, f"i{DECODE}")
    spaces.fill(PREFILL, 0, PROMPT, NAMES)
    return spaces


def end(spaces: Spaces, copy: CopyPages, **how: object) -> None:
    """This copy, whatever others are under way."""
    others = {number: each for number, each in spaces.copies.items() if each is not copy}
    spaces.copies = {copy.copy_id: copy}
    spaces.copied(**how)
    spaces.copies.update(others)


def give_back(spaces: Spaces, count: int) -> None:
    spaces.give_back(DECODE, spaces.take(DECODE, count))


def content(spaces: Spaces, got: wire.Acquired) -> list[str]:
    return [spaces.bytes[1, page] for page in u32_list(got.pages)]


def is_clean(spaces: Spaces) -> None:
    assert not spaces.core.pulls.pulls
    assert not spaces.core.pulls._arriving
    spaces.counts()
    for pool in spaces.core.pools.values():
        engines = pool.memory.engines.attached.values() if pool.memory is not None else ()
        pinned = sum(len(engine.pinned) for engine in engines)
        pinned += sum(len(lease.entries) for lease in pool.leases.leases.values())
        assert sum(entry.pins for entry in pool.index.entries()) == pinned


def test_the_first_blocks_go_while_an_engine_still_has_the_pages_of_the_others(pair):
    acquire(pair, PROMPT)
    (first,) = pair.copies.values()
    assert [page for _, page in first.sources] == [
        e.page for e in pair.core.pools[0].index.prefix(PROMPT[:4])
    ]
    assert [m.count for m in answers(pair, DECODE, wire.Shrink)] == [2]
    end(pair, first)
    assert not answers(pair, FRONT, wire.Acquired)
    give_back(pair, 1)
    assert not pair.copies  # one page is no portion
    give_back(pair, 1)
    pair.copied()
    (got,) = answers(pair, FRONT, wire.Acquired)
    assert content(pair, got) == list(NAMES)
    assert got.blocks_peer == 6
    is_clean(pair)


def test_what_came_first_stays_until_the_reader_has_it(pair):
    acquire(pair, PROMPT)
    end(pair, next(iter(pair.copies.values())))
    pair.say(FRONT, wire.Delete(call_id=9, hashes=b"".join(PROMPT[:4])))
    pair.need(DECODE, 4)  # its engine wants all that nobody pins
    give_back(pair, 2)
    pair.copied()
    (got,) = answers(pair, FRONT, wire.Acquired)
    assert content(pair, got) == list(NAMES)
    is_clean(pair)


def test_a_later_portion_that_ends_first_stays_too_and_waits_for_the_earlier_one(pair):
    acquire(pair, PROMPT)
    (first,) = pair.copies.values()
    give_back(pair, 2)
    _, last = pair.copies.values()
    end(pair, last)
    assert not answers(pair, FRONT, wire.Acquired)
    pair.say(FRONT, wire.Delete(call_id=9, hashes=b"".join(PROMPT[4:])))
    end(pair, first)
    (got,) = answers(pair, FRONT, wire.Acquired)
    assert content(pair, got) == list(NAMES)
    is_clean(pair)


def test_a_reader_that_comes_later_waits_for_the_same_blocks(pair):
    acquire(pair, PROMPT)
    acquire(pair, PROMPT[:3], call_id=2)
    end(pair, next(iter(pair.copies.values())))
    acquire(pair, PROMPT[:5], call_id=3)
    give_back(pair, 2)
    assert len(pair.copies) == 1
    pair.copied()
    got = {each.call_id: each for each in answers(pair, FRONT, wire.Acquired)}
    assert [content(pair, got[number]) for number in (1, 2, 3)] == [list(NAMES), list("abc"), list("abcde")]
    is_clean(pair)


def test_blocks_behind_a_portion_that_failed_are_not_brought(pair):
    acquire(pair, PROMPT)
    (first,) = pair.copies.values()
    give_back(pair, 1)
    end(pair, first, failed=True, in_doubt=first.targets[:2])
    (got,) = answers(pair, FRONT, wire.Acquired)
    assert (got.num_blocks, pair.copies) == (0, {})
    assert [pair.state_in(1, page) for page in first.targets[:2]] == [PageState.QUARANTINED] * 2
    is_clean(pair)
    pair.run(pair.core.on_settled(1, first.targets[:2], pair.now_ms))
    acquire(pair, PROMPT[:2], call_id=2)
    pair.copied()
    assert content(pair, answers(pair, FRONT, wire.Acquired)[-1]) == ["a", "b"]


def test_a_portion_that_fails_after_the_last_one_began_leaves_the_blocks_before_it(pair):
    acquire(pair, PROMPT)
    (first,) = pair.copies.values()
    give_back(pair, 2)
    _, last = pair.copies.values()
    end(pair, last, failed=True)
    assert not answers(pair, FRONT, wire.Acquired)
    end(pair, first)
    (got,) = answers(pair, FRONT, wire.Acquired)
    assert (got.num_blocks, got.blocks_peer) == (4, 4)
    is_clean(pair)


def test_a_reader_that_waited_long_enough_for_pages_gets_the_portions_that_came(pair):
    acquire(pair, PROMPT)
    (first,) = pair.copies.values()
    pair.advance(300)
    assert not answers(pair, FRONT, wire.Acquired)  # they are on their way
    end(pair, first)
    (got,) = answers(pair, FRONT, wire.Acquired)
    assert content(pair, got) == list("abcd")
    assert pair.core.next_deadline_ms() is None or pair.core.next_deadline_ms() > pair.now_ms
    is_clean(pair)


def test_portions_whose_pages_are_all_here_are_small_and_the_last_ones_shorter():
    names = [f"n{i}" for i in range(40)]
    spaces = Spaces(40, portion_bytes=PAGE_BYTES)
    spaces.worker(PREFILL, "cpu:0", quota=40)
    spaces.worker(DECODE, "cpu:1", quota=0)
    spaces.client(FRONT, f"i{DECODE}")
    prompt = chain(*names)
    spaces.fill(PREFILL, 0, prompt, names)
    acquire(spaces, prompt)
    assert [len(copy.targets) for copy in spaces.copies.values()] == [LARGEST] * 9 + [3, 1]
    spaces.copied()
    (got,) = answers(spaces, FRONT, wire.Acquired)
    assert content(spaces, got) == names
    is_clean(spaces)


def test_small_copies_go_whole(pair):
    acquire(pair, PROMPT[:4])
    assert [len(copy.targets) for copy in pair.copies.values()] == [4]


def test_what_nobody_waits_for_goes_whole(pair):
    """Blocks ahead of their reader begin when all of their pages are here, or never."""
    source, target = pair.core.pools[0], pair.core.pools[1]
    assert pair.core.pulls.push(source, target, PROMPT, pair.now_ms, within_ms=100) == 6
    pair.advance(0)
    assert not pair.copies
    give_back(pair, 2)
    assert [len(copy.targets) for copy in pair.copies.values()] == [6]
    pair.copied()
    is_clean(pair)


def copy_of(copy_id: int, spaces: list[int], follows: int = 0) -> CopyPages:
    sources = [(number, PageId(0)) for number in spaces]
    return CopyPages(copy_id, 0, [PageId(n) for n in range(len(spaces))], sources, 1000, follows=follows)


def test_what_has_begun_goes_on_though_its_producer_is_in_debt_and_what_waits_goes_behind_it():
    shelf = Shelf(7, 1, 0, PageTable(8, Epoch(1)))
    copies = LendingCopies({7: shelf}, lambda _: 1_000, lambda _: False, 100_000)
    copies.limit(10_000)

    def issue(*actions: CopyPages, now_ms: int = 0) -> list[int]:
        out, refused = copies.issue(actions, now_ms, has_reader=lambda _: True, dropping=lambda _: False)
        assert not refused
        return [action.copy_id for action in out]

    assert issue(copy_of(1, [7, 7, 7])) == [1]  # three times what passes at once
    assert issue(copy_of(2, [7], follows=1)) == [2]
    assert issue(copy_of(3, [7])) == []
    assert issue(copy_of(4, [7], follows=3)) == []  # its first waits
    assert issue(now_ms=10_000) == [3, 4]


def test_only_blocks_of_the_memory_that_the_first_portion_reads_follow_it():
    def follows(*prefills: int) -> bool:
        spaces = Spaces(portion_bytes=2 * PAGE_BYTES)
        for number in (PREFILL, 5):
            spaces.worker(number, f"cpu:{number}", quota=6)
        spaces.worker(DECODE, "cpu:d", quota=4)
        spaces.client(FRONT, f"i{DECODE}")
        for number, part in zip(prefills, (range(4), range(4, 6)), strict=True):
            pages = spaces.take(number, len(part))
            spaces.write(number, pages)
            spaces.seal(number, pages, PROMPT, first=part[0])
        acquire(spaces, PROMPT)
        (first,) = spaces.copies.values()
        give_back(spaces, 2)
        _, last = spaces.copies.values()
        assert first.follows == 0
        return last.follows == first.copy_id

    assert follows(PREFILL, PREFILL)
    assert not follows(PREFILL, 5)


@pytest.mark.parametrize(("names", "got"), [("aab", "a"), ("aba", "ab"), ("aabbcc", "a")])
def test_a_block_that_is_named_twice_comes_once_and_harms_nobody(pair, names, got):
    hashes = [PROMPT[NAMES.index(name)] for name in names]
    acquire(pair, hashes)
    while pair.copies:
        pair.copied()
    (acquired,) = answers(pair, FRONT, wire.Acquired)
    assert content(pair, acquired) == list(got), "the longest prefix that is one prompt"
    is_clean(pair)
