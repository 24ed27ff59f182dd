"""Blocks leave one by one: a reader has some behind ones that left, and so has who hands off."""

import pytest

from shared.ids import HandoffId
from shared.kv.words import u32_list
from shared.wire import mempool as wire
from tests.unit.test_mempool_spaces import ABC, DECODE, FRONT, PREFILL, Spaces, acquire, answers, two

__all__ = ["two"]


def hold_apart(spaces: Spaces, connection: int, space: int, numbers: tuple[int, ...]) -> None:
    """Of ABC only these blocks, as when others have left."""
    for number in numbers:
        pages = spaces.take(connection, 1)
        spaces.write(connection, pages)
        spaces.seal(connection, pages, ABC, first=number)
        spaces.bytes[space, pages[0][0]] = "abc"[number]


@pytest.mark.parametrize(("there", "here"), [((0, 1, 2), (1,)), ((0, 2), (1,)), ((1,), (0, 2))])
def test_blocks_that_the_reader_has_behind_missing_ones_are_part_of_its_prefix(two, there, here):
    hold_apart(two, PREFILL, 0, there)
    hold_apart(two, DECODE, 1, here)
    two.say(FRONT, wire.Match(call_id=5, hashes=b"".join(ABC)))
    assert answers(two, FRONT, wire.Matched)[0].num_blocks == 3
    acquire(two, ABC)
    (copy,) = two.copies.values()
    assert len(copy.targets) == 3 - len(here)
    two.copied()
    (got,) = answers(two, FRONT, wire.Acquired)
    assert [two.bytes[1, page] for page in u32_list(got.pages)] == ["a", "b", "c"]
    two.counts()


def test_a_handoff_holds_what_is_there_of_it_also_behind_blocks_that_left(two):
    hold_apart(two, PREFILL, 0, (0, 2))
    two.say(PREFILL, wire.HandoffReady(handoff_id=HandoffId("h"), hashes=b"".join(ABC), ttl_ms=10_000))
    held = two.core.pools[0].leases.handoffs[HandoffId("h")].entries
    assert [entry.block_hash for entry in held] == [ABC[0], ABC[2]]
    acquire(two, ABC, handoff_id=HandoffId("h"), wait_ms=1_000)
    two.copied()
    assert answers(two, FRONT, wire.Acquired)[0].num_blocks == 1
    assert two.core.status().num_handoffs == 0
    assert all(entry.pins == 1 for entry in held), "the engine's own pins are left"
