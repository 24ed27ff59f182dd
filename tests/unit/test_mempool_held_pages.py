"""What a caller's library believes that it holds: less than it does when in doubt, never more."""

import numpy as np
import pytest

from shared.ids import Epoch, PageId, SpaceId
from shared.mempool.caller_memory import CallerMemory
from shared.mempool.held_pages import MAX_PAGES, HeldPages, stretch_of
from shared.wire.mempool import AttachRefused
from shared.wire.mempool_api import Medium, PageAddress
from tests.support import held_checks

OWN, THEIRS = 1, 2


def at(page: int, epoch: int = 100, key: int = THEIRS, space: int = 3, medium=Medium.HBM) -> PageAddress:
    return PageAddress(key, medium, SpaceId(space), PageId(page), Epoch(epoch))


@pytest.fixture
def held() -> HeldPages:
    return HeldPages(OWN)


def may_write(held: HeldPages, *addresses: PageAddress) -> bool:
    stretch = stretch_of(addresses)
    columns = held.columns(stretch)
    return columns is not None and held_checks.may_write(columns, stretch)


def is_pinned(held: HeldPages, address: PageAddress) -> bool:
    stretch = stretch_of([address])
    columns = held.columns(stretch)
    return columns is not None and held_checks.is_pinned(columns, stretch)


def test_allocated_pages_are_written_under_their_epoch_until_they_are_given_up(held):
    held.allocated([at(1), at(2)])
    assert may_write(held, at(1), at(2))
    assert not may_write(held, at(1, 101))
    assert not may_write(held, at(1), at(9))
    assert not may_write(held, at(1, key=OWN))
    held.given_up([at(1)])
    assert not may_write(held, at(1))
    assert may_write(held, at(2))
    held.disowned([at(2, key=OWN)])  # by whatever name
    assert not may_write(held, at(2))


def test_a_pin_that_was_given_up_before_its_answer_was_read_is_none(held):
    """Of a space that nothing was heard of before, too; and pages far beyond those that are known."""
    for address in (at(1), at(5_000)):
        held.given_up([address])
        held.pinned([address])
        assert not is_pinned(held, address)
        held.pinned([address])
        assert is_pinned(held, address)


def test_a_pin_under_a_new_epoch_counts_anew_and_an_old_address_ends_none(held):
    held.pinned([at(1), at(1)])
    held.pinned([at(1, 105)])
    assert not is_pinned(held, at(1))
    held.given_up([at(1)])
    assert is_pinned(held, at(1, 105))
    held.given_up([at(1, 105)])
    assert not is_pinned(held, at(1, 105))


def test_lent_pages_and_those_beside_them_are_the_mempools_to_write(held):
    held.allocated([at(1, medium=Medium.LEASED), at(2, medium=Medium.DRAM)])
    assert not may_write(held, at(2, medium=Medium.DRAM))


def test_pages_of_the_mempools_transfers_are_left_to_it_until_it_has_answered(held):
    held.allocated([at(1), at(2)])
    begun = held.mediate([at(1)])
    assert not may_write(held, at(1))
    assert may_write(held, at(2))
    held.settle(begun)
    assert may_write(held, at(1))
    held.mediate([at(1)])  # never answered
    held.given_up([at(1)])
    held.allocated([at(1, 101)])
    assert may_write(held, at(1, 101)), "the mempool gives away only what nothing touches"


def test_lists_of_several_spaces_and_nonsense_are_nothing_to_copy_from(held):
    assert stretch_of([]) is None
    assert stretch_of([at(1), at(1, space=4)]) is None
    assert stretch_of([at(1), at(2, medium=Medium.DRAM)]) is None
    assert not stretch_of([at(1), at(1)]).is_distinct
    held.allocated([at(MAX_PAGES)])
    assert held.columns(stretch_of([at(MAX_PAGES)])) is None
    held.allocated([at(1), at(1, space=4)])
    assert may_write(held, at(1))
    assert may_write(held, at(1, space=4))
    assert np.array_equal(stretch_of([at(7), at(3)]).pages, [7, 3])


def test_a_process_speaks_to_a_successor_only_when_it_listens_and_no_copy_of_any_connection_runs():
    """Before, another connection's copy could still begin: its mempool would seem to live."""
    did = []

    class Link:
        up = False

        def connect(self) -> None:
            did.append("connect")

        def call(self, message, timeout_ms):
            did.append(type(message).__name__)
            return AttachRefused(code="memory.replaced", reason=""), [], []

    memory = CallerMemory.__new__(CallerMemory)
    memory._link, memory._listening, memory._attach = Link(), False, AttachRefused(code="", reason="")
    memory._quiet = lambda: did.append("quiet")
    assert memory._tell_once()
    assert did == ["connect", "quiet", "AttachRefused"]
