"""Which blocks are away, what an answer about a forgotten swap means, and how fast the way is."""

import random

import pytest

from shared.fair.away import Absences, Block, SwapRate, SwapState
from shared.fair.rules import FairRules, Room
from shared.fair.slices import FairSlices
from shared.ids import BlockHash

SEED = BlockHash(b"\0" * 32)
BLOCKS = {i: Block(BlockHash(bytes([i + 1]) * 32), SEED) for i in range(3)}


def left(book: Absences, kept: bytes = b"\1\1\1"):
    swap = book.leave("r", BLOCKS, 1.0)
    return book.left(swap.number, kept)


def test_what_is_kept_is_away_and_what_comes_back_is_here():
    book = Absences()
    swap, positions = left(book, b"\1\0\1")
    assert positions == [0, 2]
    assert (book.state("r"), book.num_away("r")) == (SwapState.AWAY, 2)
    assert not book.is_here("r")
    assert book.come("r", 2.0) is swap
    assert book.num_coming == 2
    assert book.came(swap.number) is swap
    assert (book.state("r"), book.is_waiting) == (None, False)


def test_a_request_runs_with_blocks_that_are_leaving_and_the_late_answer_is_nobodys():
    book = Absences()
    swap = book.leave("r", BLOCKS, 1.0)
    assert book.is_here("r")
    assert book.num_leaving == 3
    assert book.forget("r") == swap.number
    assert book.left(swap.number, b"\1\1\1")[0].is_forgotten
    assert book.state("r") is None
    assert book.left(swap.number, b"\1\1\1") == (None, [])


def test_of_a_request_that_ends_while_its_blocks_come_the_pages_are_still_told():
    book = Absences()
    left(book)
    swap = book.come("r", 2.0)
    book.forget("r")
    found = book.came(swap.number)
    assert found is not None
    assert found.is_forgotten
    assert len(found.blocks) == 3


def test_nothing_kept_and_blocks_that_stay_end_an_absence():
    book = Absences()
    left(book, b"\0\0\0")
    assert book.state("r") is None
    swap, positions = left(book)
    book.stays(swap, positions)
    assert book.state("r") is None
    left(book)
    for position in BLOCKS:
        book.found("r", position)
    assert book.state("r") is None


def test_blocks_that_others_still_had_here_are_away_and_no_bytes_that_move():
    book = Absences()
    swap, _ = left(book)
    swap.num_shared = 2
    assert (book.num_away("r"), book.num_elsewhere("r")) == (3, 1)
    for position in list(swap.blocks)[:2]:
        book.found("r", position)
    assert (book.num_away("r"), book.num_elsewhere("r")) == (1, 0)
    book.take_changed()
    book.come("r", 2.0)  # it was not here any more
    assert (book.num_elsewhere("r"), book.take_changed()) == (1, {"r"})
    assert book.num_elsewhere("nobody") == 0


def test_a_lost_mempool_leaves_what_was_leaving_here_and_is_asked_again_about_the_rest():
    book = Absences()
    left(book)
    book.come("r", 2.0)
    book.leave("stays", BLOCKS, 2.0)
    assert book.lost_pool() == ["r"]
    assert book.state("stays") is None
    swap = book.again("r", 3.0)
    assert not book.may_come("r")  # one question at a time
    assert book.left(swap.number, b"\0\0\0") == (swap, [])
    assert book.num_away("r") == 3  # it finds out when it comes
    assert book.may_come("r")


@pytest.mark.parametrize("kept", [b"\1\1\1", b"\1\0\1"])
def test_what_a_successor_still_keeps_is_away_until_it_comes(kept):
    book = Absences()
    left(book)
    book.lost_pool()
    swap = book.again("r", 3.0)
    assert book.left(swap.number, kept) == (swap, [])  # nothing left just now: there is nothing to let go of
    assert (book.state("r"), book.num_away("r")) == (SwapState.AWAY, 3)
    assert not book.is_here("r")
    assert book.come("r", 4.0) is swap
    assert list(swap.blocks) == [0, 1, 2]


def test_a_rate_is_measured_and_none_while_there_is_no_space():
    rate = SwapRate()
    assert rate.value(0.0) == 0.0
    assert rate.wants_probe(0.0, 10.0)
    rate.add(1_000, 0.5, 1.0)
    assert rate.value(1.0) == 2_000.0
    rate.add(0, 9.0, 1.5)
    assert rate.value(2.0) == 2_000.0
    assert not rate.wants_probe(5.0, 10.0)
    assert rate.wants_probe(20.0, 10.0)
    rate.probed(19.5)
    assert not rate.wants_probe(20.0, 10.0)
    rate.none_until_s = 30.0
    assert rate.value(20.0) == 0.0
    assert not rate.wants_probe(20.0, 10.0)
    for _ in range(20):
        rate.add(1_000, 1.0, 31.0)
    assert 990.0 < rate.value(31.0) < 1_010.0


def test_a_rate_that_is_set_is_not_measured():
    rate = SwapRate(5.0)
    rate.add(1_000, 1.0, 1.0)
    assert rate.value(1.0) == 5.0
    assert not rate.wants_probe(100.0, 10.0)


def contended(swap_bytes_per_s: float) -> tuple[FairSlices, Room]:
    slices = FairSlices(FairRules(slice_steps=1))
    for i in range(4):
        slices.add(f"r{i}", "t", 1.0, 1)
        slices.holds(f"r{i}", 10, 10 if i < 2 else 0)
    for i in range(2):
        slices.started(f"r{i}")
        slices.served(f"r{i}", 100, 0)
    room = Room(2, 64, pages=20, page_bytes=1_000, swap_bytes_per_s=swap_bytes_per_s, step_ms=10.0)
    return slices, room


def test_the_measured_rate_decides_whether_slices_pay():
    slow, room = contended(1e6)
    assert not slow.plan(room).is_fair
    assert not slow.pays
    fast, room = contended(1e9)
    plan = fast.plan(room)
    assert plan.is_fair
    assert fast.pays
    assert plan.moved_pages == 20


def test_where_slices_do_not_pay_who_is_here_goes_before_who_is_away_and_newcomers_come_last():
    slices = FairSlices(FairRules())
    for name in ("new", "away", "here", "ran"):
        slices.add(name, "t", 1.0, 1)
    slices.started("ran")
    slices.holds("new", 5, 0)
    slices.holds("away", 5, 1, 4)
    slices.holds("here", 5, 5)
    slices.holds("ran", 5, 5)
    assert slices.plan(Room(2, 64, pages=10)).start == ["here", "away", "new"]


@pytest.mark.parametrize("seed", range(40))
def test_sums_of_blocks_are_those_of_every_swap_after_any_order_of_events(seed):
    draw, book, numbers = random.Random(seed), Absences(), []
    for _ in range(200):
        name = f"r{draw.randrange(4)}"
        swap = book.of(name)
        event = draw.choice(
            ["leave", "come", "forget", "stay", "found", "answer", "answer", "answer", "lose"]
        )
        if event == "leave" and swap is None:
            numbers.append(book.leave(name, BLOCKS, 1.0).number)
        elif event == "come" and book.may_come(name):
            numbers.append(book.come(name, 1.0).number)
        elif event == "forget":
            book.forget(name)
        elif event == "found" and book.may_come(name):
            assert swap is not None
            book.found(name, next(iter(swap.blocks)))
        elif event == "answer" and numbers:
            number = numbers.pop(draw.randrange(len(numbers)))
            if (asked := book._asked.get(number)) is not None and asked.state is SwapState.COMING:
                book.came(number)
            else:
                found, positions = book.left(number, bytes(draw.randrange(2) for _ in BLOCKS))
                if found is not None and found.state is SwapState.AWAY and draw.random() < 0.3:
                    book.stays(found, [p for p in positions if p in found.blocks][:1])
        elif event == "lose" and draw.random() < 0.1:
            numbers = [book.again(lost, 1.0).number for lost in book.lost_pool()]
        swaps = book.all()
        leaving = [s for s in swaps if s.state is SwapState.LEAVING]
        coming = [s for s in book._asked.values() if s.state is SwapState.COMING]
        assert book.num_leaving == sum(len(s.blocks) for s in leaving)
        assert book.num_coming == sum(len(s.blocks) for s in coming)
        assert book.away == {s.request_id: len(s.blocks) for s in swaps if s.state is not SwapState.LEAVING}
        assert all(book.is_here(s.request_id) for s in leaving)
