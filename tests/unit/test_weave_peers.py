"""A rank that waited for another one in vain ends, hands on nothing that it computed since, and says why."""

import contextlib
import logging
import os
import threading

import pytest
from vllm.v1.outputs import AsyncModelRunnerOutput

from shared.engine import weave_peers
from shared.engine.weave_peers import Peers
from shared.errors import PeerTimeout

PATIENCE_S = 20


class Rank:
    """A fused operation's word, and how this process ended: `ended` instead of its end."""

    def __init__(self) -> None:
        self.failure = ""
        self.ended = threading.Event()
        self.errors: list[str] = []
        self.peers = Peers(self.check, self.end)

    def check(self) -> None:
        if self.failure:
            raise PeerTimeout(self.failure)

    def end(self, error: PeerTimeout) -> None:
        self.errors.append(error.message)
        self.ended.set()


class Late(AsyncModelRunnerOutput):
    """A step whose sum turns out to be wrong while it is computed, behind its launch."""

    def __init__(self, rank: Rank, failure: str = "") -> None:
        self.rank, self.failure = rank, failure

    def get_output(self):
        self.rank.failure = self.failure
        return "tokens"


@pytest.fixture
def rank(monkeypatch):
    """Its thread never looks by itself."""
    monkeypatch.setattr(weave_peers, "WATCH_S", 3_600)
    made = Rank()
    yield made
    made.peers.close()


def test_tokens_of_a_step_that_waited_in_vain_are_not_handed_on(rank):
    with rank.peers.awaited():
        output = rank.peers.checked(Late(rank, "rank 0 waited for rank 1"))
    with pytest.raises(PeerTimeout):
        output.get_output()
    assert rank.errors == ["rank 0 waited for rank 1"]


def test_tokens_of_a_step_whose_peers_all_came_are_handed_on(rank):
    assert rank.peers.checked(Late(rank)).get_output() == "tokens"
    assert rank.peers.checked("what is there already") == "what is there already"
    assert not rank.errors


def test_a_wait_that_ran_out_in_a_step_ends_the_process_at_once(rank):
    with pytest.raises(PeerTimeout), rank.peers.awaited():
        raise PeerTimeout("a peer's connection is closed")
    with contextlib.suppress(ValueError), rank.peers.awaited():
        raise ValueError("another fault is the caller's")
    assert rank.errors == ["a peer's connection is closed"]


def test_a_rank_that_is_asked_for_no_output_and_no_further_step_ends_too(monkeypatch):
    monkeypatch.setattr(weave_peers, "WATCH_S", 0.01)
    rank = Rank()
    rank.failure = "rank 1 waited for rank 0"
    assert rank.ended.wait(PATIENCE_S)
    assert rank.errors == ["rank 1 waited for rank 0"]
    rank.peers.close()


def test_the_end_is_a_line_of_the_log_and_a_status_of_its_own(monkeypatch, caplog):
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with caplog.at_level(logging.CRITICAL):
        weave_peers.end_process(PeerTimeout("rank 0 waited 20000 ms for rank 1"))
    assert codes == [weave_peers.EXIT_PEER_LOST]
    assert caplog.messages == [
        "this engine's ranks are apart, and it ends: rank 0 waited 20000 ms for rank 1"
    ]


def test_after_close_nobody_looks(rank, caplog):
    rank.peers.close()
    rank.failure = "its memory is gone"
    with caplog.at_level(logging.CRITICAL):
        assert not rank.peers._thread.is_alive()
    assert not rank.errors
