"""Cache events between two processes' ends: in order, never blocking, whole again after a gap."""

import itertools
import time

import pytest

from shared.engine.cache_events import CacheEventReceiver, CacheEventSender


def block(i):
    return i.to_bytes(4, "big") * 8


class Front:
    """What a front knows of the cache from its events."""

    def __init__(self, receiver):
        self.receiver = receiver
        self.kinds = []
        self.held = set()

    def poll(self):
        self.receiver.poll(self.on_event)

    def on_event(self, event):
        self.kinds.append(event.kind)
        if event.kind == "stored":
            self.held |= set(event.hashes)
        elif event.kind == "removed":
            self.held -= set(event.hashes)
        else:
            self.held = set()

    def until(self, wanted):
        deadline = time.monotonic() + 30
        while self.held != wanted:
            assert time.monotonic() < deadline, len(self.held)
            self.poll()
            time.sleep(0.001)


@pytest.fixture
def ends(tmp_path):
    address = f"ipc://{tmp_path}/events"
    receiver = CacheEventReceiver(address)
    sender = CacheEventSender(address, high_water_events=4)
    yield sender, Front(receiver)
    sender.close()
    receiver.close()


def test_events_arrive_in_order(ends):
    sender, front = ends
    sender.send("stored", [block(1), block(2)])
    sender.send("removed", [block(1)])
    sender.send("stored", [])
    front.until({block(2)})
    sender.send("cleared", [])
    front.until(set())
    assert front.kinds == ["stored", "removed", "cleared"]


def test_after_a_gap_the_front_is_told_everything_anew(ends):
    sender, front = ends
    sender.send("stored", [block(0)])
    front.until({block(0)})
    payload = [block(i) for i in range(1, 20_000)]
    sender.send("stored", payload)  # the front sleeps
    for i in itertools.count(100_000):
        sender.send("stored", [block(i)] * 2_000)
        if sender.dropped:
            break
    sender.send("removed", payload)
    wanted = {block(0), *(block(n) for n in range(100_000, i + 1))}
    deadline = time.monotonic() + 30
    while front.held != wanted:  # nobody repeats an event by itself: the next one brings all
        assert time.monotonic() < deadline
        front.poll()
        sender.send("removed", [block(1)])
        time.sleep(0.001)
    assert "cleared" in front.kinds
