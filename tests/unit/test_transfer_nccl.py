"""The NCCL pair with a fake library that moves bytes when both ends have posted, and a driver that only records."""

import ctypes
import itertools
import threading
import time
from collections import deque

import numpy as np
import pytest

from shared.errors import PeerGone
from shared.transfer.errors import PathUnavailable, PeerLost, TransferError, TransferFailed, TransferTimeout
from shared.transfer.interface import Peer, Region, RegionKind
from shared.transfer.nccl import NcclLink, NcclTransport, Sends
from shared.transfer.nccl_library import ID_BYTES

PAGE = 512


class FakeNccl:
    """Both ends' library. A pair of groups meets in order; a broken one never does."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.numbers = itertools.count(1)
        self.comms: dict[int, tuple[bytes, int]] = {}
        self.sends: dict[bytes, list] = {}
        self.receives: dict[bytes, list] = {}
        self.met: dict[bytes, int] = {}
        self.slow = 0  # how often "in progress" is answered after a call
        self.busy: dict[int, int] = {}
        self.aborted: list[int] = []
        self.frozen = False

    def unique_id(self):
        return next(self.numbers).to_bytes(ID_BYTES, "little")

    def open(self, unique_id, rank):
        with self.lock:
            comm = next(self.numbers)
            self.comms[comm] = (unique_id, rank)
            return comm

    def ready(self, comm):
        with self.lock:
            if comm not in self.comms:
                raise TransferFailed("the pair has been ended")
            left = self.busy.get(comm, 0)
            self.busy[comm] = max(0, left - 1)
            return left == 0

    def send(self, comm, buffers, stream):
        self._post(self.sends, comm, buffers)

    def receive(self, comm, buffers, stream):
        self._post(self.receives, comm, buffers)

    def _post(self, groups, comm, buffers):
        with self.lock:
            assert self.busy.get(comm, 0) == 0, "a call while another is in progress"
            self.busy[comm] = self.slow
            key = self.comms[comm][0]
            groups.setdefault(key, []).append(buffers)
            sends, receives = self.sends.get(key, []), self.receives.get(key, [])
            while not self.frozen and self.met.get(key, 0) < min(len(sends), len(receives)):
                number = self.met.get(key, 0)
                for (source, size), (target, length) in zip(sends[number], receives[number], strict=True):
                    assert size == length
                    ctypes.memmove(target, source, size)
                self.met[key] = number + 1

    def abort(self, comm):
        with self.lock:
            self.comms.pop(comm, None)
            self.aborted.append(comm)

    def all_met(self):
        with self.lock:
            return all(self.met.get(key, 0) == len(groups) for key, groups in self.receives.items())


class FakeDriver:
    def __init__(self, nccl) -> None:
        self.nccl = nccl
        self.numbers = itertools.count(1)

    def make_current(self):
        return None

    def create_stream(self):
        return next(self.numbers)

    create_event = create_stream

    def record(self, event, stream):
        return None

    def passed(self, event):
        return self.nccl.all_met() or bool(self.nccl.aborted)


class Direct:
    """A channel to a link of the same process; messages of a frozen end are lost."""

    def __init__(self) -> None:
        self.link = None
        self.gone = False

    def send(self, message):
        if self.gone:
            raise PeerGone("gone")
        if self.link is not None:
            self.link.on_message(message)


@pytest.fixture
def pair():
    nccl = FakeNccl()
    ends, memories = [], []
    for name in ("a", "b"):
        transport = NcclTransport(
            name, nccl, FakeDriver(nccl), may_send=lambda region, pages: 15 not in pages
        )
        memory = np.random.default_rng(len(ends)).integers(0, 256, (16, PAGE), np.uint8)
        transport.register(
            Region(f"{name}-pages", RegionKind.CUDA_PAGES, memory.ctypes.data, PAGE, 16, name, device=0)
        )
        ends.append(transport)
        memories.append(memory)
    channels = [Direct(), Direct()]
    descriptions = [end.describe() for end in ends]
    links = [
        end.connect(Peer(descriptions[1 - number], channel=channels[number]))
        for number, end in enumerate(ends)
    ]
    channels[0].link, channels[1].link = links[1], links[0]
    yield nccl, links, memories, channels
    for end in ends:
        end.close()


def pull(links, number, source, target, timeout_ms=60_000):
    names = ["a-pages", "b-pages"]
    return links[number].pull(names[1 - number], source, names[number], target, timeout_ms=timeout_ms)


@pytest.mark.parametrize("slow", [0, 3])
def test_pulls_in_both_directions_at_once_bring_the_right_bytes_in_one_group_each(pair, slow):
    nccl, links, memories, _ = pair
    nccl.slow = slow
    before = [memory.copy() for memory in memories]
    futures = [pull(links, end, [n, n + 4], [n + 8, n + 11]) for n in range(3) for end in (0, 1)]
    for future in futures:
        assert future.result(30).num_bytes == 2 * PAGE
    for end in (0, 1):
        for n in range(3):
            assert np.array_equal(memories[end][[n + 8, n + 11]], before[1 - end][[n, n + 4]])
    assert sorted(len(groups) for groups in nccl.sends.values()) == [3, 3]
    assert all(len(group) == 2 for groups in nccl.sends.values() for group in groups)


@pytest.mark.parametrize("slow", [0, 1, 2, 3])
def test_groups_are_answered_in_the_order_in_which_they_were_posted_whoever_is_polled_when(slow):
    """The puller posts its receives in the order of the answers: any other order is another group's bytes."""
    for polls in itertools.product((0, 1), repeat=10):
        nccl = FakeNccl()
        nccl.slow = slow
        link = NcclLink.__new__(NcclLink)  # its sending half alone
        link._library, link._driver, link._send_stream = nccl, FakeDriver(nccl), 1
        link._serves_on = nccl.open(b"pair", 0)
        groups = [Sends(link, [(number, 1)]) for number in range(2)]
        link._unsent = deque(groups)
        answered = []
        for number in polls:
            if number not in answered and groups[number].poll():
                answered.append(number)
        posted = [buffers[0][0] for buffers in nccl.sends.get(b"pair", [])]
        assert posted == sorted(posted), polls
        assert answered == posted[: len(answered)], polls


def test_a_refused_pull_does_not_disturb_the_next(pair):
    nccl, links, memories, _ = pair
    with pytest.raises(TransferError, match="not leased"):
        pull(links, 0, [15], [1]).result(30)
    pull(links, 0, [14], [1]).result(30)
    assert np.array_equal(memories[0][1], memories[1][14])
    assert not nccl.aborted


def test_a_deadline_ends_the_pair_and_later_pulls_are_refused(pair):
    nccl, links, _, channels = pair
    channels[0].link = None  # the source is frozen: it hears nothing
    with pytest.raises(TransferTimeout):
        pull(links, 0, [1], [2], timeout_ms=50).result(30)
    assert len(set(nccl.aborted)) == 2
    deadline = time.monotonic() + 30
    while links[0].quarantined():
        assert time.monotonic() < deadline
    with pytest.raises(PeerLost):
        pull(links, 0, [1], [2])


def test_host_memory_is_not_for_nccl(pair):
    nccl, *_ = pair
    transport = NcclTransport("c", nccl, FakeDriver(nccl))
    with pytest.raises(PathUnavailable):
        transport.register(Region("host", RegionKind.HOST, 4096, PAGE, 1, "h"))
    transport.close()
