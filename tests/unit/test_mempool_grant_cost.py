"""What one event costs when many pages change hands: counted, not timed."""

from services.mempool.core.engines import Engine, Engines
from services.mempool.core.entry import Branch, Entry
from services.mempool.core.page_state import PageEvent
from services.mempool.core.page_table import PageTable
from services.mempool.core.radix import Index
from services.mempool.core.release_choice import Choice
from services.mempool.core.space import Memory
from shared.ids import Epoch, InstanceId, PageId
from tests.unit.mempool_harness import SEED, chain
from tests.unit.test_mempool_transfer_cost import Counted

MANY = 4_096


class CountingIndex(Index):
    """`num_moved`: blocks that got another branch."""

    num_moved = 0

    def _split(self, branch: Branch, at: int) -> Branch:
        self.num_moved += len(branch.entries) - at
        return super()._split(branch, at)


def test_blocks_of_one_long_prompt_leave_for_the_system_in_one_pass_over_it():
    """Each took a pass of its own over all that continue it: a second for 512 pages of 64,000."""
    index, table = CountingIndex(), PageTable(MANY, Epoch(1))
    engines = Engines(table, 1.0, 1.0, index)
    pages, _ = table.grant_many(MANY)
    table.apply_all(pages, PageEvent.WRITE)
    table.apply_all(pages, PageEvent.SEAL)
    hashes = chain(*range(MANY))
    index.insert_all(
        [Entry(h, p, page, 4) for h, p, page in zip(hashes, [SEED, *hashes], pages, strict=False)]
    )
    choice = Choice(Memory("c", "f", 4, 4096, table, engines), index)
    choice.search(set())
    index.pin([index.get(hashes[7])])
    assert choice.evict(pages[: MANY // 2 : 2]) == MANY // 4
    assert table.num_free == MANY // 4
    assert index.num_moved <= MANY
    assert choice.evict(pages) == MANY - MANY // 4 - 1, "what is pinned stays"


def engine(connection: int, quota: int) -> Engine:
    return Engine(connection, connection, InstanceId(f"i{connection}"), Epoch(0), quota, demand=quota)


def test_pages_for_several_engines_are_granted_many_at_once():
    table = PageTable(MANY, Epoch(1))
    engines = Engines(table, 1.0, 1.0, Index())
    for connection, quota in ((1, 10), (2, MANY), (3, MANY)):
        engines.attach(engine(connection, quota))
    with Counted() as counted:
        granted = engines.serve(lambda: False)
    assert [len(granted[connection]) for connection in (1, 2, 3)] == [10, MANY // 3, MANY // 3]
    assert counted.num_calls < MANY / 10
    engines.lose(3)
    engines.bury(3)
    engines.serve(lambda: False)
    assert [each.num_pages for each in engines.attached.values()] == [10, MANY // 2]


def test_the_last_pages_go_one_each_to_those_with_the_fewest():
    table = PageTable(8, Epoch(1))
    engines = Engines(table, 1.0, 1.0, Index())
    first = engine(1, 2)
    engines.attach(first)
    engines.serve(lambda: False)
    for connection in (2, 3, 4):
        engines.attach(engine(connection, 8))
    first.demand = first.quota = 8
    engines.serve(lambda: False)
    assert [each.num_pages for each in engines.attached.values()] == [2, 2, 2, 2]
    table.reserve([PageId(0)])
    assert engines.serve(lambda: False) == {}
