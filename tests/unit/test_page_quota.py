"""What an engine takes from its mempool in one turn."""

from pathlib import Path

from shared.ids import Epoch, InstanceId, PageId
from shared.kv.words import u32_bytes, u64_bytes
from shared.mempool.page_quota import PageQuota
from shared.wire import mempool as wire
from tests.unit.mempool_release_rig import GPU_DESCRIPTION


def asked(tmp_path: Path, *counts: int) -> PageQuota:
    """Messages for so many pages each have come; their numbers count from 1, their pages from 0."""
    quota = PageQuota(tmp_path / "none.sock", InstanceId("e"), GPU_DESCRIPTION, 1)
    first = 0
    for number, count in enumerate(counts, 1):
        pages = range(first, first + count)
        first += count
        vacate = wire.Vacate(
            number=number, pages=u32_bytes(pages), epochs=u64_bytes(page + 100 for page in pages)
        )
        quota._on_message(0, vacate, [], [])
    return quota


def test_small_requests_for_pages_are_answered_together_and_large_ones_one_a_turn(tmp_path: Path):
    quota = asked(tmp_path, 4, 8, wire.PAGES_PER_VACATE - 12, 1, wire.PAGES_PER_VACATE + 1, 2)
    turns = [quota.take_vacates() for _ in range(4)]
    assert [numbers for numbers, _ in turns] == [[1, 2, 3], [4], [5], [6]]
    assert [len(pages) for _, pages in turns] == [wire.PAGES_PER_VACATE, 1, wire.PAGES_PER_VACATE + 1, 2]
    everything = [own for _, pages in turns for own in pages]
    assert everything == [(PageId(page), Epoch(page + 100)) for page in range(len(everything))]
    assert quota.take_vacates() == ([], [])


def test_a_page_that_was_asked_for_twice_is_named_once(tmp_path: Path):
    quota = asked(tmp_path, 3)
    again = wire.Vacate(number=2, pages=u32_bytes([2, 3]), epochs=u64_bytes([102, 103]))
    quota._on_message(0, again, [], [])
    numbers, pages = quota.take_vacates()
    assert numbers == [1, 2]
    assert pages == [(PageId(page), Epoch(page + 100)) for page in range(4)]
