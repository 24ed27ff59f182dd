"""A caller's direct way: a mapping that failed is tried again ever later; what can never be is not."""

import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from shared.ids import InstanceId, SpaceId
from shared.mempool import direct_ways
from shared.mempool.direct_ways import RETRY_MAX_S, RETRY_MIN_S, Way, Ways
from shared.mempool.held_pages import Stretch
from shared.transfer.errors import PathUnavailable
from shared.wire.mempool_api import Medium, instance_key

P = InstanceId("prefill-0")


class Memory:
    """A CallerMemory of host memory; `refuse` says how often the next ones cannot be made."""

    refuse, made, pages = 0, 0, {}

    def __init__(self, _socket, _instance, _pages_of, space, **_how):
        Memory.made += 1
        if Memory.refuse:
            Memory.refuse -= 1
            raise PathUnavailable("too many descriptors are open")
        self.content_key, self.page_bytes = "content", Memory.pages.get(space, 64)
        self.window, self.address = None, 4096
        self.words = np.zeros(8, np.uint64)

    def leave(self):
        pass


def stretch(space):
    pages, epochs = np.array([0], np.int64), np.array([1], np.uint64)
    return Stretch(instance_key(P), SpaceId(space), Medium.DRAM, pages, epochs, last=0, is_distinct=True)


class Rig:
    def __init__(self):
        self.now_s = 100.0
        self.ways = Ways(Path("/nowhere"), P, lambda: None)

    def between(self, source=1, target=2):
        """After what it began has ended."""
        found = self.ways.between(stretch(source), stretch(target))
        for thread in threading.enumerate():
            if thread.name == "quire-caller-map":
                thread.join(10)
        return found


@pytest.fixture
def rig(monkeypatch):
    it = Rig()
    monkeypatch.setattr(direct_ways, "CallerMemory", Memory)
    monkeypatch.setattr(direct_ways, "time", SimpleNamespace(monotonic=lambda: it.now_s))
    Memory.refuse, Memory.made, Memory.pages = 0, 0, {}
    yield it
    it.ways.close()
    it.ways.leaver.join(10)


def test_a_mapping_that_failed_is_tried_again_after_one_second_then_after_two_and_the_way_is_there(rig):
    Memory.refuse = 2
    assert rig.between() == "not mapped yet"
    for wait_s in (RETRY_MIN_S, 2 * RETRY_MIN_S):
        rig.now_s += wait_s - 0.01
        before = Memory.made
        assert rig.between() == "no mapping"
        assert Memory.made == before
        rig.now_s += 0.02
        assert rig.between() == "not mapped yet"
    assert isinstance(rig.between(), Way)


def test_where_no_mapping_ever_works_one_is_tried_a_minute(rig):
    Memory.refuse = 1_000
    rig.between()
    for _ in range(20):
        rig.now_s += RETRY_MAX_S + 0.01
        assert rig.between() == "not mapped yet"
        assert rig.between() == "no mapping"
    assert Memory.made == 21


def test_pages_that_are_unlike_stay_so(rig):
    Memory.pages = {2: 128}
    rig.between()
    for _ in range(3):
        rig.now_s += 2 * RETRY_MAX_S
        assert rig.between() == "unlike pages"
    assert Memory.made == 2


def test_a_connection_that_was_closed_maps_nothing_more(rig):
    Memory.refuse = 1
    rig.between()
    rig.ways.close()
    rig.now_s += RETRY_MAX_S
    rig.between()
    assert Memory.made == 1


def test_without_machine_code_or_when_it_cannot_be_made_numpys_checks_serve(rig, monkeypatch, caplog):
    monkeypatch.setattr(direct_ways, "native_checks", lambda: None)
    rig.between()
    assert isinstance(rig.between(), Way)
    assert rig.ways.checks is direct_ways.CHECKS

    def broken():
        raise RuntimeError("cannot cache function")

    monkeypatch.setattr(direct_ways, "native_checks", broken)
    other = Rig()
    other.between()
    assert isinstance(other.between(), Way)
    assert other.ways.checks is direct_ways.CHECKS
    assert "cannot cache function" in caplog.text
    other.ways.close()
    other.ways.leaver.join(10)


def test_checks_in_machine_code_serve_from_the_first_way_on_and_are_sought_once(rig, monkeypatch):
    sought = []
    real = direct_ways.native_checks
    monkeypatch.setattr(direct_ways, "native_checks", lambda: sought.append(1) or real())
    rig.between()
    assert rig.ways.checks is not direct_ways.CHECKS
    rig.between(2, 1)
    assert isinstance(rig.between(2, 1), Way)
    assert len(sought) == 1
