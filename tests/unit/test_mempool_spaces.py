"""Several spaces in one mempool: who belongs where, and blocks that are copied to the reader's space."""

from collections import deque

import msgspec
import pytest

from services.mempool.core import space as space_module
from services.mempool.core.actions import (
    Action,
    CopyPages,
    CreateMemory,
    PoolLimits,
    ReleaseUnits,
    RestoreUnits,
)
from services.mempool.core.mempool import Mempool
from shared.errors import PeerProtocolError
from shared.ids import HandoffId, InstanceId
from shared.kv.layout import EngineDescription
from shared.kv.page import PageState, unpack_word
from shared.kv.words import u32_list
from shared.wire import mempool as wire
from tests.unit.mempool_harness import (
    BOOT,
    DESCRIPTION,
    PAGE_BYTES,
    Harness,
    Owned,
    chain,
    check_stock,
    page_lists,
)

PREFILL, DECODE, FRONT = 1, 2, 3
ABC = chain("a", "b", "c")


class Spaces(Harness):
    """A mempool whose actions are kept by space; copies end when the test says so."""

    readable = (PageState.SEALED, PageState.LEASED)  # what copies may read

    def __init__(self, num_pages: int = 8, **limits: object) -> None:
        super().__init__(num_pages)
        options = {"granted_share": 1.0, "kept_share": 1.0, "stock_share": 1.0, "idle_punch_ms": 0} | limits
        self.pool = self.core = Mempool(PoolLimits(capacity_bytes=num_pages * PAGE_BYTES, **options), BOOT)
        self.spaces: dict[int, CreateMemory] = {}
        self.words_of: dict[tuple[int, int], int] = {}
        self.bytes: dict[tuple[int, int], str] = {}
        self.copies: dict[int, CopyPages] = {}
        self.memory: deque[ReleaseUnits | RestoreUnits] = deque()

    def run(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case CreateMemory():
                    self.spaces[action.space] = action
                case ReleaseUnits() | RestoreUnits():
                    self.memory.append(action)
                case CopyPages():
                    ahead = action.cut is not None and action.cut.step > 0  # of the seal (layered.py)
                    for source in action.sources:
                        assert ahead or self.state_in(*source) in self.readable
                    written = (PageState.WRITING, PageState.LEASED)
                    assert all(self.state_in(action.space, p) in written for p in action.targets)
                    self.copies[action.copy_id] = action
            if hasattr(action, "words"):
                self.words = {}
                super().run([action])
                self.words_of.update({(action.space, page): word for page, word in self.words.items()})
            else:
                self.words = {p: w for (s, p), w in self.words_of.items() if s == getattr(action, "space", 0)}
                super().run([action])

    def state_in(self, number: int, page: int) -> PageState:
        return unpack_word(self.words_of[number, page])[1]

    def worker(
        self,
        connection: int,
        device: str,
        *,
        quota: int = 4,
        instance: str = "",
        description: EngineDescription = DESCRIPTION,
    ) -> None:
        """A rank and its engine, which works in the pages."""
        name = InstanceId(instance or f"i{connection}")
        rank = wire.Attach(kind="rank", instance=name, description=description, device=device)
        self.run(self.core.on_attach(100 + connection, connection, rank, self.now_ms))
        self.engine(connection, quota=quota, instance=name, works_in_pages=True, description=description)

    def copied(self, **how: object) -> None:
        for copy_id, copy in list(self.copies.items()):
            del self.copies[copy_id]
            for (space, page), target in zip(copy.sources, copy.targets, strict=True):
                self.bytes[copy.space, target] = self.bytes.get((space, page), "")
            self.run(self.core.on_copied(copy_id, self.now_ms, **how))

    def fill(self, connection: int, space: int, hashes: list, names: str) -> list[Owned]:
        pages = self.save(connection, hashes)
        self.bytes.update({(space, page): name for (page, _), name in zip(pages, names, strict=True)})
        return pages

    def counts(self) -> None:
        for pool in self.core.pools.values():
            check_stock(pool)
            if pool.memory is not None:
                assert sum(pool.memory.table.counts) == pool.memory.table.num_pages


@pytest.fixture
def two() -> Spaces:
    spaces = Spaces()
    spaces.worker(PREFILL, "cpu:0")
    spaces.worker(DECODE, "cpu:1")
    spaces.client(FRONT, f"i{DECODE}")
    return spaces


def answers(spaces: Spaces, connection: int, kind: type) -> list:
    return [message for message in spaces.sent[connection] if isinstance(message, kind)]


def acquire(spaces: Spaces, hashes: list, call_id: int = 1, **fields: object) -> None:
    spaces.say(FRONT, wire.Acquire(call_id=call_id, hashes=b"".join(hashes), **fields))


def test_devices_have_spaces_of_their_own_and_equal_devices_share_one(two):
    two.worker(9, "cpu:1")
    assert {s.label for s in two.spaces.values()} == {"0", "1"}
    assert two.core.space_of(InstanceId("i9")) == two.core.space_of(InstanceId(f"i{DECODE}"))
    attached = [answers(two, c, wire.Attached)[0] for c in (PREFILL, DECODE, 9, FRONT)]
    assert attached[1].memory_id == attached[2].memory_id == attached[3].memory_id != attached[0].memory_id


def test_another_content_gets_a_space_and_shares_nothing(two):
    other = msgspec.structs.replace(DESCRIPTION, dtype="bfloat16")
    two.engine(20, description=other)
    assert len(two.spaces) == 3
    two.fill(PREFILL, 0, ABC, "abc")
    two.client(21, "i20")
    two.say(21, wire.Acquire(call_id=1, hashes=b"".join(ABC)))
    assert answers(two, 21, wire.Acquired)[0].num_blocks == 0


def test_a_reader_gets_what_another_space_has_after_it_was_copied(two):
    two.fill(PREFILL, 0, ABC, "abc")
    acquire(two, ABC)
    assert not answers(two, FRONT, wire.Acquired)
    two.copied()
    (got,) = answers(two, FRONT, wire.Acquired)
    assert [two.bytes[1, page] for page in u32_list(got.pages)] == ["a", "b", "c"]
    assert all(two.state_in(1, page) is PageState.SEALED for page in u32_list(got.pages))
    two.counts()


def test_only_missing_blocks_move(two):
    two.fill(PREFILL, 0, ABC, "abc")
    two.fill(DECODE, 1, ABC[:2], "ab")
    acquire(two, ABC)
    (copy,) = two.copies.values()
    assert len(copy.targets) == 1
    two.copied()
    (got,) = answers(two, FRONT, wire.Acquired)
    assert got.num_blocks == 3


def test_a_handoff_is_waited_for_then_copied_and_its_hold_ends(two):
    handoff = HandoffId("h")
    acquire(two, ABC, handoff_id=handoff, wait_ms=1_000)
    assert not two.copies
    two.fill(PREFILL, 0, ABC, "abc")
    two.say(PREFILL, wire.HandoffReady(handoff_id=handoff, hashes=b"".join(ABC), ttl_ms=10_000))
    assert two.core.status().num_handoffs == 1
    two.copied()
    assert answers(two, FRONT, wire.Acquired)[0].num_blocks == 3
    assert two.core.status().num_handoffs == 0


def test_two_readers_of_the_same_blocks_wait_for_one_copy(two):
    two.fill(PREFILL, 0, ABC, "abc")
    acquire(two, ABC, 1)
    acquire(two, ABC, 2)
    assert len(two.copies) == 1
    two.copied()
    assert [got.num_blocks for got in answers(two, FRONT, wire.Acquired)] == [3, 3]


def test_a_reader_in_another_space_keeps_a_handoff_that_it_will_come_for(two):
    handoff = HandoffId("h")
    two.say(PREFILL, wire.HandoffReady(handoff_id=handoff, hashes=b"".join(ABC), ttl_ms=1_000))
    two.advance(900)
    two.say(FRONT, wire.KeepHandoff(handoff_id=handoff, ttl_ms=1_000))
    two.advance(900)
    assert two.core.status().num_handoffs == 1
    two.advance(100)
    assert two.core.status().num_handoffs == 0


def greedy() -> Spaces:
    """The decode engine has all pages of its space."""
    spaces = Spaces()
    spaces.worker(PREFILL, "cpu:0")
    spaces.worker(DECODE, "cpu:1", quota=8)
    spaces.client(FRONT, f"i{DECODE}")
    spaces.fill(PREFILL, 0, ABC, "abc")
    assert spaces.core.pools[1].memory.table.num_free == 0
    return spaces


def test_without_free_pages_the_engine_is_asked_and_the_copy_begins_when_they_come():
    spaces = greedy()
    acquire(spaces, ABC)
    assert not spaces.copies
    assert [shrink.count for shrink in answers(spaces, DECODE, wire.Shrink)] == [3]
    spaces.give_back(DECODE, spaces.take(DECODE, 2))
    assert not spaces.copies
    spaces.give_back(DECODE, spaces.take(DECODE, 1))
    assert len(spaces.copies) == 1
    spaces.copied()
    assert answers(spaces, FRONT, wire.Acquired)[0].num_blocks == 3


def test_engines_that_could_not_give_pages_are_asked_again():
    spaces = greedy()
    acquire(spaces, ABC)
    spaces.give_back(DECODE, spaces.take(DECODE, 1), answers=3)
    spaces.advance(60)
    assert [shrink.count for shrink in answers(spaces, DECODE, wire.Shrink)] == [3, 2]
    spaces.give_back(DECODE, spaces.take(DECODE, 2))
    assert len(spaces.copies) == 1


def test_a_reader_without_pages_to_copy_into_is_answered_in_time():
    two = greedy()
    acquire(two, ABC)
    while not answers(two, FRONT, wire.Acquired):
        assert two.now_ms < 150
        two.advance(two.core.next_deadline_ms() - two.now_ms)
    assert answers(two, FRONT, wire.Acquired)[0].num_blocks == 0
    assert not two.copies
    assert not two.core.pulls.pulls
    assert two.core.pools[0].index.num_pinned == 3  # the prefill engine's own
    two.counts()


@pytest.mark.parametrize("in_doubt", [False, True])
def test_a_failed_copy_is_a_miss_and_its_pages_come_back_when_nothing_writes_them(two, in_doubt):
    two.fill(PREFILL, 0, ABC, "abc")
    free = two.core.pools[1].memory.table.num_free
    acquire(two, ABC)
    (copy,) = two.copies.values()
    two.copied(failed=True, in_doubt=copy.targets[:2] if in_doubt else ())
    assert answers(two, FRONT, wire.Acquired)[0].num_blocks == 0
    table = two.core.pools[1].memory.table
    assert table.by_state()["quarantined"] == (2 if in_doubt else 0)
    if in_doubt:
        two.run(two.core.on_settled(1, copy.targets[:2], two.now_ms))
    assert table.num_free == free
    two.counts()


def test_sources_cannot_be_evicted_while_they_are_copied(two):
    pages = two.fill(PREFILL, 0, ABC, "abc")
    two.say(PREFILL, wire.Unpin(**page_lists(pages)))
    acquire(two, ABC)
    two.need(PREFILL, 100)
    two.worker(9, "cpu:0", quota=8)
    assert all(two.state_in(0, page) is PageState.SEALED for page, _ in pages)
    two.copied()
    assert two.core.pools[0].index.num_pinned == 0


def test_a_reader_that_leaves_is_forgotten_and_its_blocks_stay(two):
    two.fill(PREFILL, 0, ABC, "abc")
    acquire(two, ABC)
    two.closed(FRONT)
    two.copied()
    assert not answers(two, FRONT, wire.Acquired)
    assert len(two.core.pools[1].index) == 3
    assert two.core.status().num_leases == 0


def test_a_client_that_came_before_its_engine_reads_in_the_engines_space():
    spaces = Spaces()
    spaces.client(FRONT, f"i{DECODE}")
    spaces.worker(PREFILL, "cpu:0")
    spaces.worker(DECODE, "cpu:1")
    spaces.fill(PREFILL, 0, ABC, "abc")
    acquire(spaces, ABC)
    spaces.copied()
    (got,) = answers(spaces, FRONT, wire.Acquired)
    assert got.num_blocks == 3
    spaces.say(FRONT, wire.Release(lease_id=got.lease_id))
    assert spaces.core.status().num_leases == 0


def test_match_counts_what_a_reader_would_get_and_delete_drops_it_everywhere(two):
    pages = two.fill(PREFILL, 0, ABC, "abc")
    two.say(PREFILL, wire.Unpin(**page_lists(pages)))
    two.say(FRONT, wire.Match(call_id=5, hashes=b"".join(ABC)))
    assert answers(two, FRONT, wire.Matched)[0].num_blocks == 3
    two.say(FRONT, wire.Delete(call_id=6))
    assert answers(two, FRONT, wire.Deleted)[0].num_blocks == 3
    assert two.core.status().num_indexed == 0


def test_status_adds_the_spaces_up(two):
    status = two.core.status()
    assert status.num_pages == sum(s.num_pages for s in status.spaces) == 16
    assert [s.devices for s in status.spaces] == [["cpu:0"], ["cpu:1"]]
    assert sum(status.pages_by_state.values()) == 16


def test_lease_names_of_two_spaces_differ(two):
    two.fill(PREFILL, 0, ABC[:1], "a")
    two.client(4, f"i{PREFILL}")
    two.fill(DECODE, 1, ABC[:1], "a")
    for connection in (FRONT, 4):
        two.say(connection, wire.Acquire(call_id=1, hashes=ABC[0]))
    names = {answers(two, c, wire.Acquired)[0].lease_id for c in (FRONT, 4)}
    assert len(names) == 2


def test_messages_before_attach_and_second_attaches_are_refused(two):
    with pytest.raises(PeerProtocolError):
        two.say(77, wire.StatusCall(call_id=1))
    with pytest.raises(PeerProtocolError):
        two.client(FRONT)


@pytest.mark.parametrize(
    ("block_bytes", "gib"), [(8 << 20, 131), (98_304, 131), (2 << 20, 120), (8 << 20, 8)]
)
def test_a_gpu_has_no_more_allocations_than_a_process_has_descriptors_for(block_bytes, gib):
    described = msgspec.structs.replace(DESCRIPTION, block_bytes=block_bytes)
    attach = wire.Attach(
        kind="rank",
        instance=InstanceId("x"),
        description=described,
        device="cuda:" + "ab" * 16,
        capacity_bytes=gib << 30,
    )  # fmt: skip
    planned = space_module.plan(described, attach, PoolLimits(capacity_bytes=1 << 30))
    assert planned.num_pages // planned.pages_per_slab <= space_module.MAX_SLABS
    assert planned.num_pages % planned.pages_per_slab == 0
    assert planned.num_pages * planned.page_bytes > 0.98 * (gib << 30)


@pytest.mark.parametrize("given", [1, 2])
def test_with_too_few_pages_the_first_blocks_come_in_time(given):
    spaces = greedy()
    acquire(spaces, ABC)
    spaces.give_back(DECODE, spaces.take(DECODE, given))
    while not spaces.copies:
        assert spaces.now_ms < 150
        spaces.advance(spaces.core.next_deadline_ms() - spaces.now_ms)
    assert spaces.now_ms < 150, "some of the reader's time is left for the copy"
    assert [len(copy.targets) for copy in spaces.copies.values()] == [given]
    spaces.copied()
    assert answers(spaces, FRONT, wire.Acquired)[0].num_blocks == given
    assert spaces.core.counters["pulls_shortened"] == 1
    assert [e.pins for e in spaces.core.pools[0].index.entries()] == [1] * 3  # the prefill engine's own
    spaces.counts()


def test_more_blocks_than_the_space_has_pages_come_as_far_as_they_fit():
    spaces = Spaces(num_pages=8)
    spaces.worker(PREFILL, "cpu:0", quota=8)
    spaces.worker(DECODE, "cpu:1", quota=1)
    spaces.client(FRONT, f"i{DECODE}")
    long = chain(*"abcdef")
    spaces.fill(PREFILL, 0, long, "abcdef")
    reader = spaces.core.pools[1].releases
    reader.on_call(0, wire.ReleaseMemory(call_id=1, num_bytes=4 * PAGE_BYTES), 0, 1000)
    spaces.run(spaces.core.after_api(0))
    spaces.run(spaces.core.on_released(1, sorted(reader.freeing), 0))
    acquire(spaces, long)
    spaces.advance(120)
    spaces.copied()
    assert 0 < answers(spaces, FRONT, wire.Acquired)[0].num_blocks < 6
    spaces.counts()
