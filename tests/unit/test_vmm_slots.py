"""vAttention's rules for request slots, one claim each; tests/property/test_vmm_slots_model.py tries every order."""

import pytest

from shared.vmm.errors import BadMapping
from shared.vmm.slot_commands import Map, Unmap, merged
from shared.vmm.slots import HOLE, SlotTable


class Driven:
    """A table of 3 slots of 8 pages of 4 tokens whose commands are executed at once."""

    def __init__(self, pages=20, slots=3, **options):
        self.table = SlotTable(slots, 8, 4, **{"ahead_tokens": 1, "eager_pages": 0, **options})
        self.table.grant(range(pages))
        self.lens = [0] * slots
        self.commands = []

    def alloc(self, tokens, prefix=()):
        reqid = self.table.alloc_reqid(prefix, tokens)
        if reqid is not None:
            self.lens[reqid] = tokens
        return reqid

    def step(self, grow=0):
        self.lens = [n + grow if n else 0 for n in self.lens]
        answer = self.table.step(self.lens)
        self.commands = [*answer.now, *answer.later]
        self.table.ack(answer.now_batch + 1)
        return answer

    def end(self, reqid, fence=0):
        self.lens[reqid] = 0
        self.table.free_reqid(reqid, fence)

    def flush(self):
        batch, self.commands = self.table.flush()
        self.table.ack(batch)


def run_of(reqid, first, count):
    return range(reqid * 8 + first, reqid * 8 + first + count)


def test_a_prompt_is_mapped_in_one_run_before_its_step():
    driven = Driven()
    reqid = driven.alloc(11)
    answer = driven.table.step(driven.lens)
    assert answer.ok
    assert answer.wait_for == answer.now_batch
    (command,) = answer.now
    assert command.first == reqid * 8
    assert len(command.pages) == 3
    assert command.writable


def test_decode_maps_the_next_page_in_the_background_one_step_ahead():
    driven = Driven()
    driven.alloc(6)
    driven.step()
    answers = [driven.step(grow=1) for _ in range(6)]
    assert not any(answer.now for answer in answers), "no step waits for a map"
    assert [len(answer.later) for answer in answers] == [0, 1, 0, 0, 0, 1]
    assert all(answer.wait_for == 0 for answer in answers)


def test_a_step_waits_for_a_background_map_that_is_not_executed_yet():
    table = SlotTable(1, 8, 4, ahead_tokens=1, eager_pages=0)
    table.grant(range(8))
    table.alloc_reqid()
    first = table.step([4])
    table.ack(first.now_batch)
    assert first.later == [Map(0 + 1, (table.pages_of(0)[1],), True)]
    second = table.step([5])
    assert second.ok
    assert not second.now
    assert second.wait_for == first.now_batch + 1


def test_what_the_next_step_is_known_to_need_is_mapped_in_the_background():
    driven = Driven()
    reqid = driven.alloc(4)
    coming = [16 if i == reqid else 0 for i in range(3)]
    answer = driven.table.step(driven.lens, coming)
    assert [len(one.pages) for one in answer.now] == [1]
    assert [len(one.pages) for one in answer.later] == [3]


def test_a_new_request_takes_over_the_pages_of_an_ended_one():
    driven = Driven()
    first = driven.alloc(12)
    driven.step()
    pages = driven.table.pages_of(first)
    driven.end(first, fence=9)  # not passed: nothing needs to be unmapped
    assert driven.alloc(12) == first
    answer = driven.step()
    assert not answer.now
    assert driven.table.pages_of(first)[:3] == pages[:3]


def test_the_slot_whose_leftover_fits_best_is_taken():
    driven = Driven()
    small, large = driven.alloc(4), driven.alloc(20)
    driven.step()
    driven.end(small)
    driven.end(large)
    assert driven.alloc(17) == large
    assert driven.alloc(3) == small


def test_one_idle_slot_has_pages_before_anybody_asks():
    driven = Driven(eager_pages=3)
    driven.step()
    (command,) = driven.commands
    assert len(command.pages) == 3
    reqid = driven.alloc(12)
    assert command.first == reqid * 8
    assert not driven.step().now
    assert len(driven.commands) == 2, "one page ahead of the request; the next idle slot gets its pages"


def test_lack_of_memory_is_an_answer_and_maps_nothing():
    driven = Driven(pages=4)
    driven.alloc(8)
    other = driven.alloc(12)
    answer = driven.step()
    assert not answer.ok
    assert (answer.num_short, answer.num_returning) == (1, 0)
    assert driven.table.num_free == 4
    driven.end(other)
    assert driven.step().ok


def test_a_short_step_gets_the_pages_of_ended_requests_once_unmapped_and_acknowledged():
    driven = Driven(pages=6)
    first = driven.alloc(20)
    driven.step()
    driven.end(first, fence=1)
    driven.alloc(4, prefix=())
    second = next(i for i, n in enumerate(driven.lens) if n)
    other = driven.table.alloc_reqid((), 24)
    driven.lens[other] = 24
    answer = driven.step()
    assert not answer.ok
    assert answer.now == [], "the fence has not passed"
    driven.table.passed(1)
    assert second == first, "its own leftover pages are in use again"
    driven.end(second, fence=1)
    answer = driven.table.step(driven.lens)
    assert not answer.ok
    assert answer.num_returning >= answer.num_short
    assert [type(one) for one in answer.now] == [Unmap]
    assert not driven.table.step(driven.lens).ok, "unmapped, but nobody said so yet"
    driven.table.ack(answer.now_batch + 2)
    assert driven.step().ok


def test_ended_requests_are_reclaimed_when_fewer_than_a_tenth_is_free():
    driven = Driven(pages=20, reclaim_ratio=0.1)
    first, second, third = driven.alloc(32), driven.alloc(32), driven.alloc(8)
    driven.step()
    driven.end(first, fence=1)
    driven.table.passed(1)
    assert driven.table.num_free == 1 < 0.1 * 20
    driven.lens[second] = 32
    driven.step()
    assert driven.commands == [Unmap(first * 8, 8)]
    assert driven.table.num_free == 9
    driven.end(second, fence=1)
    driven.step()
    assert driven.commands == [], "enough is free: the next ended request keeps its pages"
    assert third != second


def test_pages_are_unmapped_only_behind_their_fence():
    driven = Driven(slots=1)
    reqid = driven.alloc(8)
    driven.step()
    pages = driven.table.seal(reqid, 2)
    for page in pages:
        driven.table.pin(page)  # the index keeps them: they cannot be written again in place
    driven.end(reqid, fence=5)
    driven.table.passed(4)
    assert driven.alloc(8) is None
    driven.table.passed(5)
    assert driven.alloc(8) == reqid
    answer = driven.step()
    assert answer.now[0] == Unmap(0, 2)
    assert not set(driven.table.pages_of(reqid)) & set(pages)


def test_a_prefix_hit_maps_the_same_pages_read_only_and_only_the_rest_anew():
    driven = Driven()
    first = driven.alloc(12)
    driven.step()
    prefix = driven.table.seal(first, 2)
    for page in prefix:
        driven.table.pin(page)
    second = driven.alloc(14, prefix=prefix)
    assert second != first
    free = driven.table.num_free
    answer = driven.step()
    assert answer.now[0] == Map(second * 8, tuple(prefix), False)
    assert len(answer.now[1].pages) == 2
    assert driven.table.num_free == free - 2
    assert [driven.table.is_private(second, i) for i in range(4)] == [False, False, True, True]


def test_the_next_turn_finds_its_pages_where_they_were():
    driven = Driven()
    first = driven.alloc(12)
    driven.step()
    prefix = driven.table.seal(first, 3)
    for page in prefix:
        driven.table.pin(page)
    driven.end(first, fence=7)
    assert driven.alloc(16, prefix=prefix) == first
    assert [len(one.pages) for one in driven.step().now if isinstance(one, Map)] == []


def test_an_alias_is_never_written_in_place_even_when_nobody_else_is_left():
    driven = Driven(slots=2)
    first = driven.alloc(8)
    driven.step()
    prefix = driven.table.seal(first, 2)
    for page in prefix:
        driven.table.pin(page)
    second = driven.alloc(12, prefix=prefix)
    driven.step()
    driven.end(first)
    assert driven.alloc(4) == first
    driven.step()  # the first slot lets go of the sealed pages
    driven.end(second)
    for page in prefix:
        driven.table.unpin(page)
    assert driven.alloc(8) == second
    answer = driven.step()
    assert answer.now[0] == Unmap(second * 8, 2), "they are mapped read-only here"
    assert all(driven.table.is_private(second, i) for i in range(2))


def test_a_page_that_is_aliased_again_while_leaving_stays():
    driven = Driven(slots=2)
    first = driven.alloc(4)
    driven.step()
    (page,) = driven.table.seal(first, 1)
    driven.table.pin(page)
    driven.end(first)
    driven.table.give_back(driven.table.num_free)
    driven.table.give_back(8)  # unmaps everything idle
    batch, commands = driven.table.flush()
    assert Unmap(first * 8, 1) in commands or Unmap(first * 8, 2) in commands
    again = driven.alloc(4, prefix=[page])
    driven.table.unpin(page)
    driven.table.ack(batch)
    assert driven.table.pages_of(again)[0] == page
    assert page not in driven.table.give_back(20)
    driven.table.check()


def test_another_owners_page_is_reported_once_per_alias_that_ended():
    driven = Driven(slots=2)
    one, two = driven.alloc(8, prefix=[500]), driven.alloc(8, prefix=[500])
    driven.step()
    driven.end(one)
    driven.end(two)
    driven.table.give_back(20)
    driven.table.give_back(20)
    driven.flush()
    assert driven.table.take_foreign() == [500, 500]
    assert driven.table.take_foreign() == []


def test_only_sealed_and_pinned_pages_are_aliased():
    driven = Driven()
    first = driven.alloc(8)
    driven.step()
    page = driven.table.pages_of(first)[0]
    for wrong in ([page], [HOLE]):
        with pytest.raises(BadMapping):
            driven.table.alloc_reqid(wrong)
    with pytest.raises(BadMapping):
        driven.table.pin(page)
    driven.table.seal(first, 1)
    with pytest.raises(BadMapping):
        driven.table.alloc_reqid([page])
    with pytest.raises(BadMapping):
        driven.table.unpin(page)


def test_lengths_that_cannot_be_are_refused():
    driven = Driven()
    reqid = driven.alloc(4)
    with pytest.raises(BadMapping):
        driven.table.step([33 if i == reqid else 0 for i in range(3)])
    with pytest.raises(BadMapping):
        driven.table.step([4, 4, 4])
    driven.end(reqid)
    with pytest.raises(BadMapping):
        driven.table.free_reqid(reqid)


def test_neighbouring_commands_become_runs_and_keep_their_order():
    assert merged(
        [Unmap(3, 1), Unmap(2, 1), Map(2, (9,), True), Map(3, (4,), True), Map(4, (5,), False)]
    ) == [
        Unmap(2, 2),
        Map(2, (9, 4), True),
        Map(4, (5,), False),
    ]
