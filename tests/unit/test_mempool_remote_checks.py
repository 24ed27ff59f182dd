"""What came from another host is taken up to the first page whose sum is not its source's, whatever was said of it."""

from types import SimpleNamespace

import pytest

from services.mempool.checks import Known
from services.mempool.page_sums import Piece
from services.mempool.remote_checks import RemoteChecks
from shared.ids import BlockHash
from shared.kv.words import u32_bytes, u32_list, u64_bytes
from shared.wire.mempool_peer import CheckEpochs, EpochsChecked

PAGES = [10, 11, 12, 13]


class Checks:
    """A page's sum is 1,000 + page, unless `changed` says another."""

    is_on = True

    def __init__(self) -> None:
        self.changed: dict[int, int] = {}
        self.counters = {"checks_pages_checked": 0, "checks_copies_wrong": 0}

    def block_bytes_of(self, space):
        return 6000

    def sums(self, pieces, then):
        then([self.changed.get(piece.page, 1000 + piece.page) for piece in pieces])

    def of_pages(self, space, pages, epochs):
        return {
            i: Known(Piece(space, page, 6000), epoch, BlockHash(b""), space, 1000 + page)
            for i, (page, epoch) in enumerate(zip(pages, epochs, strict=True))
            if epoch == 5
        }

    def look(self, looks, then):
        then(min((i for i, known in looks.items() if known.piece.page in self.changed), default=None))


@pytest.fixture
def rig():
    checks = Checks()
    core = SimpleNamespace(
        remote=SimpleNamespace(arriving=lambda number, address: (3, PAGES if number == 1 else ()))
    )
    return SimpleNamespace(checks=checks, both=RemoteChecks(checks, core), told=[])


def arrived(rig, checksums: bytes, stale: bytes = b"") -> list[int]:
    answer = EpochsChecked(call_id=1, stale=stale, checksums=checksums)
    assert rig.both.arrived("tcp://a:1", answer, rig.told.append)
    return u32_list(rig.told.pop().stale)


def sums(*pairs: int) -> bytes:
    return u32_bytes(pairs)


def test_a_byte_that_changed_on_the_way_makes_its_page_stale(rig):
    assert arrived(rig, sums(0, 1010, 2, 1012)) == []
    rig.checks.changed[12] = 77
    assert arrived(rig, sums(0, 1010, 2, 1012)) == [2]
    assert arrived(rig, sums(0, 1010, 2, 1012), stale=u32_bytes([1])) == [1, 2]
    assert rig.checks.counters["checks_copies_wrong"] == 2


@pytest.mark.parametrize("checksums", [sums(0, 1010, 9), sums(4, 1014), b"\0\0\0"])
def test_of_what_cannot_be_right_nothing_is_taken(rig, checksums):
    assert arrived(rig, checksums) == [0]


def test_a_pull_that_was_given_up_while_its_pages_were_summed_is_no_wrong_copy(rig):
    """They are another's by then."""
    summed = []
    rig.checks.sums = lambda _pieces, then: summed.append(then)
    answer = EpochsChecked(call_id=1, stale=b"", checksums=sums(0, 1010))
    assert rig.both.arrived("tcp://a:1", answer, rig.told.append)
    rig.both._core.remote.arriving = lambda _number, _address: (0, ())
    summed.pop()([77])
    assert rig.told == [answer]
    assert rig.checks.counters["checks_copies_wrong"] == 0


def test_an_answer_without_sums_or_for_nobody_goes_on_as_it_is(rig):
    assert not rig.both.arrived("tcp://a:1", EpochsChecked(call_id=1), rig.told.append)
    assert not rig.both.arrived("tcp://a:1", EpochsChecked(call_id=2, checksums=sums(0, 1)), rig.told.append)
    rig.checks.is_on = False
    assert not rig.both.arrived("tcp://a:1", EpochsChecked(call_id=1, checksums=sums(0, 1)), rig.told.append)
    assert rig.told == []


def question(*epochs: int, held: bool = False) -> CheckEpochs:
    return CheckEpochs(
        call_id=8, space=3, pages=u32_bytes(PAGES[: len(epochs)]), epochs=u64_bytes(epochs), held=held
    )


def test_the_source_says_the_sums_of_its_sample_and_what_it_finds_wrong(rig):
    rig.both.asked(2, question(5, 4, 5))
    assert rig.both.answering(2, EpochsChecked(call_id=8), rig.told.append)
    assert u32_list(rig.told.pop().checksums) == [0, 1010, 2, 1012]
    rig.checks.changed[12] = 77
    rig.both.asked(2, question(5, 4, 5))
    assert rig.both.answering(2, EpochsChecked(call_id=8, stale=u32_bytes([1])), rig.told.append)
    told = rig.told.pop()
    assert u32_list(told.stale) == [1, 2]
    assert u32_list(told.checksums) == [0, 1010]


def test_questions_of_callers_of_those_who_left_and_of_nobody_have_no_sums(rig):
    rig.both.asked(2, question(5, held=True))
    assert not rig.both.answering(2, EpochsChecked(call_id=8), rig.told.append)
    rig.both.asked(2, question(5))
    rig.both.forget(2)
    assert not rig.both.answering(2, EpochsChecked(call_id=8), rig.told.append)
    rig.both.asked(2, question(4))  # none of the sample
    assert not rig.both.answering(2, EpochsChecked(call_id=8), rig.told.append)
