"""A lease waits for the look at its pages; what is for the same reader comes behind it, for others at once."""

import os
from types import SimpleNamespace

import pytest

from services.mempool.core.actions import Send
from services.mempool.outbox import Outbox
from shared.ids import Epoch, LeaseId
from shared.kv.words import u32_bytes, u64_bytes
from shared.wire import mempool as wire


class Connection:
    def __init__(self) -> None:
        self.sent: list[object] = []
        self.is_closed = False

    def send(self, message, fds=()) -> None:
        for fd in fds:
            os.fstat(fd)  # open until it is sent
        self.sent.append(message)

    def close(self) -> None:
        self.is_closed = True


class Checks:
    """Pages below 100 are in the sample; looks end when the test says so."""

    def __init__(self) -> None:
        self.looks: list[tuple[dict[int, int], object]] = []
        self.ended: list[tuple[int, str]] = []

    def end_lease(self, space, lease_id) -> None:
        self.ended.append((space, lease_id))

    def of_lease(self, space, pages, epochs):
        return {i: page for i, page in enumerate(pages) if page < 100}

    def look(self, looks, then) -> None:
        self.looks.append((looks, then))

    def end(self, wrong=None) -> None:
        self.looks.pop(0)[1](wrong)


def lease(number: int, *pages: int) -> wire.Acquired:
    return wire.Acquired(
        call_id=number, lease_id=LeaseId(f"l{number}"), fencing_token=Epoch(1), num_blocks=len(pages),
        pages=u32_bytes(pages), epochs=u64_bytes([1] * len(pages)),
    )  # fmt: skip


@pytest.fixture
def rig():
    checks = Checks()
    outbox = Outbox(SimpleNamespace(), checks, 8)
    outbox.connections |= {1: Connection(), 2: Connection()}
    return SimpleNamespace(checks=checks, outbox=outbox, one=outbox.connections[1], two=outbox.connections[2])


MATCHED = wire.Matched(call_id=9, num_blocks=0)


def test_what_follows_a_lease_comes_behind_it_in_order_and_others_do_not_wait(rig):
    first, second = lease(1, 7, 200), lease(2, 8)
    rig.outbox.send(Send(1, first))
    rig.outbox.send(Send(1, MATCHED))
    read, write = os.pipe()
    os.close(write)
    rig.outbox.send_fds(1, MATCHED, [read])
    rig.outbox.send(Send(1, second))
    rig.outbox.send(Send(1, MATCHED))
    rig.outbox.send(Send(2, MATCHED))
    assert rig.one.sent == []
    assert rig.two.sent == [MATCHED]
    rig.checks.end()
    assert rig.one.sent == [first, MATCHED, MATCHED]
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(read)
    rig.checks.end()
    assert rig.one.sent[3:] == [second, MATCHED]
    rig.outbox.send(Send(1, MATCHED))
    assert len(rig.one.sent) == 6


@pytest.mark.parametrize("wrong", [1, 2])
def test_from_a_wrong_page_on_the_reader_gets_nothing(rig, wrong):
    rig.outbox.send(Send(1, lease(1, 5, 6, 7)))
    rig.checks.end(wrong)
    (got,) = rig.one.sent
    assert (got.num_blocks, len(got.pages), len(got.epochs)) == (wrong, 4 * wrong, 8 * wrong)
    assert got.lease_id == "l1"  # released by the reader, or at its time


def test_a_lease_of_nothing_is_none_and_ends_here(rig):
    rig.outbox.send(Send(1, lease(1, 5, 6), space=3))
    rig.checks.end(0)
    (got,) = rig.one.sent
    assert (got.call_id, got.num_blocks, got.lease_id) == (1, 0, "")
    assert rig.checks.ended == [(3, "l1")]


def test_a_lease_without_a_page_of_the_sample_goes_at_once(rig):
    rig.outbox.send(Send(1, lease(1, 200, 300)))
    rig.outbox.send(Send(1, lease(2)))
    assert [message.call_id for message in rig.one.sent] == [1, 2]


def test_a_reader_that_leaves_meanwhile_leaves_no_descriptor_open(rig):
    rig.outbox.send(Send(1, lease(1, 5)))
    read, write = os.pipe()
    os.close(write)
    rig.outbox.send_fds(1, MATCHED, [read])
    rig.outbox.forget(1)
    rig.checks.end()
    assert rig.one.sent == []
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(read)
