"""Which connections a gateway closes near the limit of open files."""

import resource
from dataclasses import dataclass, field

import pytest

from services.gateway.connections import MOST, make_room, num_connections
from services.gateway.push import Limits


@dataclass
class FakeTransport:
    closed: bool = False

    def is_closing(self):
        return self.closed

    def close(self):
        assert not self.closed
        self.closed = True


@dataclass
class FakeConnection:
    quiet_since_s: float
    is_spare: bool = True
    transport: FakeTransport = field(default_factory=FakeTransport)


@pytest.mark.parametrize(
    ("max_files", "most"),
    [(256, 128), (1024, 768), (4096, 3840), (1 << 20, MOST), (resource.RLIM_INFINITY, MOST)],
)
def test_a_part_of_the_files_is_for_what_is_no_connection(max_files, most):
    assert num_connections(max_files) == most


def test_the_oldest_that_can_be_spared_are_closed_and_a_few_more(monkeypatch):
    monkeypatch.setattr(Limits, "connections", 32)
    busy = [FakeConnection(0, is_spare=False) for _ in range(20)]
    idle = [FakeConnection(since_s) for since_s in range(20, 0, -1)]
    make_room([*busy, *idle])
    assert not [each for each in busy if each.transport.closed]
    assert sorted(each.quiet_since_s for each in idle if each.transport.closed) == [*range(1, 11)]
    make_room([*busy, *idle])
    assert sum(each.transport.closed for each in idle) == 10, "those that are closing make room already"


def test_requests_under_way_are_never_cut_for_new_connections(monkeypatch):
    monkeypatch.setattr(Limits, "connections", 32)
    busy = [FakeConnection(0, is_spare=False) for _ in range(40)]
    make_room(busy)
    assert not [each for each in busy if each.transport.closed]
