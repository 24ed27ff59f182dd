"""A rank's attachment to the pool's memory, from begin to end: what is closed leaves no thread and no connection."""

import threading

import pytest

from tests.unit.test_mempool_out_of_room import ATTACHED, Link, answers, stays_attached

LIMIT_S = 60


class SlowLink(Link):
    """To a mempool that answers when it is told to."""

    def __init__(self):
        super().__init__([ATTACHED])
        self.asked, self.go_on, self.is_closed = threading.Event(), threading.Event(), False

    def call(self, message, *, timeout_ms):
        self.asked.set()
        assert self.go_on.wait(LIMIT_S)
        return super().call(message, timeout_ms=timeout_ms)

    def close(self):
        super().close()
        self.is_closed = True


@pytest.fixture
def attached(monkeypatch, tmp_path):
    """(the memory, its thread, its links: the first is up, the next one slow)."""
    return stays_attached(monkeypatch, tmp_path, lambda number: SlowLink() if number else Link(answers()))


def test_the_thread_of_a_memory_that_is_closed_ends(attached):
    memory, thread, links = attached
    memory.close()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert len(links) == 1, "nothing was attached again"


def test_a_memory_that_is_closed_while_it_attaches_again_has_no_connection_left(attached):
    memory, thread, links = attached
    memory._down.set()
    while len(links) < 2:
        thread.join(0.001)
    slow = links[1]
    assert slow.asked.wait(LIMIT_S)
    memory.close()
    slow.go_on.set()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert slow.is_closed
    assert not slow.is_started
