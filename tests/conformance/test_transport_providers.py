"""One suite for every path. The other end is a process of its own, which is stopped and killed here."""

import asyncio
import importlib.util
import time
from concurrent.futures import wait

import numpy as np
import pytest

from shared.kv.page import SEALED_BYTE
from shared.transfer.epochs import sealed_check
from shared.transfer.errors import PeerLost, TransferError, TransferRefused, TransferTimeout
from shared.transfer.interface import Grant, Moved
from shared.transfer.pieces import Pieces
from tests.support.quickest import quickest_s
from tests.support.transfer_ends import NUM_PAGES, PAGE_BYTES, Ends, pattern

pytestmark = pytest.mark.slow

HAS_NIXL = importlib.util.find_spec("nixl_cu13") is not None
needs_ucxx = pytest.mark.skipif(
    importlib.util.find_spec("ucxx") is None, reason="ucxx is not installed (optional)"
)
UCXX = pytest.param("ucxx", marks=needs_ucxx)
needs_nixl = pytest.mark.skipif(not HAS_NIXL, reason="nixl-cu13 is not installed")
COPYING = [
    "shm-1",
    "shm-2",
    "imported",
    "staged",
    *(pytest.param(kind, marks=needs_nixl) for kind in ("nixl-read", "nixl-write", "nixl-write-tcp")),
    UCXX,
]
ASKING = [
    "staged",
    *(pytest.param(kind, marks=needs_nixl) for kind in ("nixl-write", "nixl-write-tcp")),
    UCXX,
]
BREAKING = ["nccl"]  # a pair that ends with its first failure: those tests take one of their own
PAGES = [5, 4, 9, 10, 11, 40, 0]
TARGETS = [3, 60, 20, 21, 22, 7, 8]
WAIT_MS = 60_000
FROZEN_S = 10  # a call to a frozen peer, by its deadline of half a second


@pytest.fixture(scope="module")
def shared_ends():
    """One pair for each path, for the tests that leave both ends alive."""
    pairs: dict[str, Ends] = {}
    yield pairs
    for pair in pairs.values():
        pair.close()


@pytest.fixture
def ends(request, shared_ends):
    pair = shared_ends.get(request.param) or shared_ends.setdefault(request.param, Ends(request.param))
    pair.mine.bytes[:] = 0
    pair.settled.clear()
    return pair


@pytest.fixture
def mortal(request):
    """A pair of its own, whose other end may be killed."""
    pair = Ends(request.param)
    yield pair
    pair.close()


def copying(function):
    name = "mortal" if "mortal" in function.__code__.co_varnames else "ends"
    return pytest.mark.parametrize(name, [*COPYING, *BREAKING], indirect=True)(function)


def asking(function):
    name = "mortal" if "mortal" in function.__code__.co_varnames else "ends"
    return pytest.mark.parametrize(name, ASKING, indirect=True)(function)


def pull(ends, source=PAGES, target=TARGETS, timeout_ms=WAIT_MS, **more) -> Moved:
    future = ends.link.pull("theirs", source, "mine", target, timeout_ms=timeout_ms, **more)
    return future.result(timeout_ms / 1000 + 30)


def assert_pages(ends, source=PAGES, target=TARGETS, seed=1):
    for here, there in zip(target, source, strict=True):
        assert np.array_equal(ends.mine.bytes[here], pattern(there, seed)), f"page {there} -> {here}"


def fails(action) -> bool:
    try:
        action()
    except TransferError:
        return True
    return False


def refuses(action) -> bool:
    try:
        action()
    except TransferRefused:
        return True
    return False


def until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


@copying
def test_pulled_pages_equal_the_sources_and_no_other_page_changes(ends):
    moved = pull(ends)
    assert moved.num_bytes == len(PAGES) * PAGE_BYTES
    assert moved.path == ends.link.path
    assert_pages(ends)
    others = [page for page in range(NUM_PAGES) if page not in TARGETS]
    assert not ends.mine.bytes[others].any()
    assert not ends.link.quarantined()


@copying
def test_parts_of_pages_go_where_they_are_sent(ends):
    pieces = Pieces.of_columns([100, PAGE_BYTES + 7], [PAGE_BYTES * 3 + 1, 5], [5000, 4096])
    ends.link.pull_pieces("theirs", "mine", pieces, timeout_ms=WAIT_MS).result(60)
    flat = ends.mine.bytes.reshape(-1)
    assert np.array_equal(flat[PAGE_BYTES * 3 + 1 :][:5000], pattern(0)[100:5100])
    assert np.array_equal(flat[5 : 5 + 4096], pattern(1)[7 : 7 + 4096])
    assert np.count_nonzero(flat) <= 9096


@copying
def test_many_transfers_at_once_all_end_well(ends):
    futures = [
        ends.link.pull("theirs", [n, n + 20], "mine", [2 * n, 2 * n + 1], timeout_ms=WAIT_MS)
        for n in range(20)
    ]
    assert not wait(futures, 60).not_done
    for n, future in enumerate(futures):
        future.result()
        assert_pages(ends, [n, n + 20], [2 * n, 2 * n + 1])


@copying
def test_what_lies_outside_the_regions_is_refused(ends):
    for source, pages, target, targets in (
        ("nobody", [0], "mine", [0]),
        ("theirs", [0], "nobody", [0]),
        ("theirs", [NUM_PAGES], "mine", [0]),
        ("theirs", [0], "mine", [NUM_PAGES]),
        ("theirs", [-1], "mine", [0]),
        ("theirs", [0, 1], "mine", [0]),
        ("theirs", [0, 1], "mine", [4, 4]),
    ):
        with pytest.raises(TransferRefused):
            ends.link.pull(source, pages, target, targets, timeout_ms=WAIT_MS)
    assert not ends.mine.bytes.any()
    assert pull(ends).num_bytes  # and the pages are not lost to later transfers
    with pytest.raises(TransferRefused):  # outside the grant
        ends.link.push("mine", [0], Grant(1, "theirs", frozenset([3])), [4], timeout_ms=WAIT_MS)


@copying
def test_a_page_is_in_one_transfer_at_a_time(ends):
    ends.stop()  # asking paths now hang; the others may be done at once
    future = ends.link.pull("theirs", [1], "mine", [2], timeout_ms=WAIT_MS)
    if not future.done():
        claimed = refuses(lambda: ends.link.pull("theirs", [3], "mine", [2], timeout_ms=WAIT_MS))
        assert claimed or future.done()
    ends.go_on()
    future.result(60)


@copying
def test_pages_whose_epoch_changed_are_told_as_stale(ends):
    assert pull(ends, check=lambda: [1, 4]).stale == (1, 4)
    assert pull(ends).stale == ()


@pytest.mark.parametrize("kind", [*COPYING, *BREAKING])
def test_a_dead_peer_is_noticed_within_two_seconds(kind):
    def attempt():
        mortal = Ends(kind)
        try:
            pull(mortal)
            mortal.kill()
            begun = time.monotonic()
            until(lambda: fails(lambda: pull(mortal)))
            until(lambda: mortal.lost)
            took_s = time.monotonic() - begun
            assert mortal.lost[0][0] == "server"
            until(lambda: not mortal.link.quarantined())  # proven dead: every page is back
            with pytest.raises(PeerLost):
                pull(mortal)
            return took_s
        finally:
            mortal.close()

    assert asyncio.run(quickest_s(attempt, 2)) < 2


@pytest.mark.parametrize("ends", COPYING, indirect=True)
def test_a_frozen_peer_costs_at_most_the_deadline(ends):
    pull(ends)
    ends.stop()
    begun = time.monotonic()
    if not fails(lambda: pull(ends, timeout_ms=500)):
        assert_pages(ends)  # one-sided paths need nobody: right bytes
    assert time.monotonic() - begun < FROZEN_S
    ends.go_on()
    until(lambda: not ends.link.quarantined())  # the source goes on and answers


@asking
def test_pages_of_a_failed_pull_are_not_reusable_until_the_frozen_source_has_answered(ends):
    if ends.kind == "staged":
        pytest.skip("a frozen owner of staged pages writes to slots only")
    pull(ends)
    ends.mine.bytes[:] = 0
    ends.stop()
    with pytest.raises(TransferTimeout) as caught:
        pull(ends, timeout_ms=1_000)
    assert set(caught.value.quarantined) == set(TARGETS)
    assert ends.link.quarantined() == {"mine": frozenset(TARGETS)}
    with pytest.raises(TransferRefused, match="quarantined"):
        ends.link.pull("theirs", [1], "mine", [TARGETS[0]], timeout_ms=WAIT_MS)
    assert not ends.settled
    ends.go_on()
    until(lambda: ends.settled == [("mine", tuple(sorted(TARGETS)))])
    assert not ends.link.quarantined()
    pull(ends)
    assert_pages(ends)


@asking
def test_pages_of_a_failed_pull_come_back_when_the_frozen_source_is_killed(mortal):
    pull(mortal)
    mortal.stop()
    with pytest.raises(TransferTimeout):
        pull(mortal, timeout_ms=1_000)
    mortal.kill()
    until(lambda: not mortal.link.quarantined())
    if mortal.kind != "staged":
        assert mortal.settled == [("mine", tuple(sorted(TARGETS)))]


@pytest.mark.parametrize("mortal", BREAKING, indirect=True)
def test_a_frozen_peer_ends_a_pair_that_cannot_forget_and_its_pages_come_back(mortal):
    pull(mortal)
    mortal.stop()
    begun = time.monotonic()
    with pytest.raises(TransferError):
        pull(mortal, timeout_ms=500)
    assert time.monotonic() - begun < FROZEN_S
    until(lambda: not mortal.link.quarantined())  # aborted: nothing writes there any more, whoever wakes up
    with pytest.raises(PeerLost):
        pull(mortal)
    before = mortal.mine.bytes.copy()
    mortal.go_on()
    time.sleep(0.2)
    assert np.array_equal(mortal.mine.bytes, before)


@asking
def test_the_source_refuses_pages_that_are_not_leased(ends):
    with pytest.raises(TransferError, match="not leased"):
        pull(ends, [1, NUM_PAGES - 1], [1, 2])
    assert not ends.link.quarantined()
    assert pull(ends, [1], [1]).num_bytes


@pytest.mark.parametrize("ends", ["shm-1", pytest.param("nixl-write", marks=needs_nixl)], indirect=True)
def test_a_push_reaches_granted_pages_only(ends):
    ends.mine.bytes[6] = 77
    grant = Grant(1, "theirs", frozenset([2]))
    ends.link.push("mine", [6], grant, [2], timeout_ms=WAIT_MS).result(60)
    assert pull(ends, [1, 2], [1, 2]).num_bytes
    assert_pages(ends, [1], [1])
    assert (ends.mine.bytes[2] == 77).all()
    ends.mine.bytes[6] = pattern(2)  # as other tests of this pair expect it
    ends.link.push("mine", [6], grant, [2], timeout_ms=WAIT_MS).result(60)


@pytest.mark.parametrize("mortal", ["alias"], indirect=True)
def test_an_alias_moves_nothing_and_refuses_to(mortal):
    before = mortal.mine.bytes.copy()
    moved = pull(mortal, [3, 4], [3, 4], check=lambda: [1])
    assert (moved.num_bytes, moved.stale) == (0, (1,))
    assert np.array_equal(mortal.mine.bytes, before)
    with pytest.raises(TransferRefused, match="same page"):
        pull(mortal, [3], [4])
    mortal.kill()
    until(lambda: mortal.lost)
    with pytest.raises(PeerLost):
        pull(mortal, [3], [3])


@pytest.mark.parametrize("ends", ["shm-1", "shm-2", "imported", "staged"], indirect=True)
def test_a_racing_writer_makes_misses_and_never_other_bytes(ends):
    """The writer rewrites all pages under growing epochs; what the check lets through is what the epoch promised."""
    ends.order(b"W")  # seeds 2, 3, 4, ... as fast as it can
    fresh = misses = 0
    deadline = time.monotonic() + 60
    while (fresh < 40 or misses < 5) and time.monotonic() < deadline:
        epochs = {page: word >> 8 for page in PAGES if (word := ends.word(page)) & 0xFF == SEALED_BYTE}
        pages = list(epochs)
        targets = TARGETS[: len(pages)]
        check = sealed_check(ends.words, pages, list(epochs.values()))
        stale = set(pull(ends, pages, targets, check=check).stale)
        for position, (page, target) in enumerate(zip(pages, targets, strict=True)):
            if position in stale:
                misses += 1
                continue
            fresh += 1
            assert_pages(ends, [page], [target], seed=epochs[page])
    ends.order(b"P")
    until(lambda: all(ends.word(page) == 1 << 8 | SEALED_BYTE for page in range(NUM_PAGES)))
    assert fresh >= 40
    assert misses >= 5
