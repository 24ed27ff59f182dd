"""What raises on a transport's thread ends no thread: waiters hear of it, the log does, and a NIXL path is lost."""

import threading
from types import SimpleNamespace

import pytest

from services.mempool.peer_links import PeerLink, Slot
from services.mempool.peer_paths import ReaderPath
from shared.transfer import nixl, provider, transfer_thread
from shared.transfer.errors import TransferFailed
from shared.transfer.interface import PathName
from shared.transfer.provider import BaseTransport
from shared.transfer.served import Ask, unpack
from shared.transfer.served_link import ServedLink, ServedPull
from shared.transfer.transfer_thread import TransferThread
from tests.unit.test_transfer_link import attempt_of, pull, rig, until

__all__ = ["rig"]


class Bug(Exception):
    pass


def bug(*_args, **_how):
    raise Bug


@pytest.fixture
def said(monkeypatch):
    found = []
    monkeypatch.setattr(transfer_thread.log, "error", lambda event, **fields: found.append((event, fields)))
    return found


class Steps:
    """A job of a number of steps, the last of which may raise."""

    def __init__(self, count, last=None):
        self.count, self.last = count, last

    def is_failed(self):
        return False

    def step(self, now_s):
        self.count -= 1
        if self.count == 0 and self.last is not None:
            self.last()
        return self.count <= 0


def test_neither_an_action_nor_a_job_that_raises_ends_the_thread_or_the_other_jobs(said):
    errors = []
    thread = TransferThread("test", on_error=errors.append)
    good, bad = Steps(200), Steps(3, bug)
    thread.post(bug)
    thread.post(lambda: (thread.add(bad), thread.add(good)))
    until(lambda: good.count == 0)
    assert bad.count == 0
    assert thread.call(lambda: 7).result(30) == 7
    assert [type(error) for error in errors] == [Bug, Bug]
    assert [event for event, _ in said] == ["transfer_thread_error"] * 2
    thread.close()


def test_a_progress_that_raises_is_said_once_and_not_called_again(said):
    calls, errors = [], []

    def progress():
        calls.append(1)
        raise Bug

    thread = TransferThread("test", progress=progress, on_error=errors.append)
    for _ in range(5):
        thread.call(lambda: None).result(30)
    assert (len(calls), len(errors), len(said)) == (1, 1, 1)
    thread.close()


def test_an_on_error_that_raises_does_not_end_the_thread_either(said):
    thread = TransferThread("test", on_error=bug)
    thread.post(bug)
    assert thread.call(lambda: 7).result(30) == 7
    assert len(said) == 2
    thread.close()


def test_who_waits_for_a_transfer_that_cannot_be_stopped_hears_of_it_and_its_pages_stay_in_doubt(rig):
    future = pull(rig)
    attempt = attempt_of(rig)
    attempt.cancel, attempt.error = bug, TransferFailed("refused")
    with pytest.raises(TransferFailed, match="Bug") as caught:
        future.result(10)
    assert caught.value.quarantined == (1, 2)
    assert rig.quarantined() == {"mine": frozenset({1, 2})}
    del attempt.cancel
    until(lambda: not rig.quarantined())
    other = pull(rig, (3, 4))
    attempt_of(rig, 1).done = True
    assert other.result(30).num_bytes


def test_a_puller_is_told_when_sending_raises():
    answers = []
    link = SimpleNamespace(answer=answers.append)
    ask = Ask(
        transfer=3, source="s", target="t", source_offsets=b"", target_offsets=b"", sizes=b"", timeout_ms=1
    )
    job = ServedPull(link, ask, SimpleNamespace(poll=bug, over=True))
    assert job.step(0.0)
    assert (answers[0].transfer, answers[0].outcome) == (3, "failed")
    assert "Bug" in answers[0].detail


def test_a_source_whose_end_is_lost_says_so_and_sends_nothing(rig):
    sent = []
    link = ServedLink(
        channel=SimpleNamespace(send=sent.append), may_send=lambda region, pages: True, thread=rig._thread,
        regions=rig._regions, peer=rig._peer_end, reason="a test", quarantine=rig._quarantine, on_settled=None,
        on_lost=lambda instance, reason: None,
    )  # fmt: skip
    link.peer_lost("an error on this side")
    link._handle(
        Ask(
            transfer=3,
            source="mine",
            target="theirs",
            source_offsets=b"",
            target_offsets=b"",
            sizes=b"",
            timeout_ms=1,
        )
    )
    answer = unpack(sent[0])
    assert (answer.transfer, answer.outcome) == (3, "failed")
    assert "an error on this side" in answer.detail


class Agent:
    """NixlAgent, whose progress can be told to raise."""

    broken = False

    def __init__(self, instance):
        self.name = instance

    def progress(self):
        if Agent.broken:
            raise Bug

    def close(self):
        return True


class Link:
    def __init__(self):
        self.lost = []
        self.peer_lost = self.lost.append

    def close(self):
        pass


def test_a_nixl_whose_progress_raises_loses_its_links_and_those_that_come(said, monkeypatch):
    monkeypatch.setattr(nixl, "NixlAgent", Agent)
    monkeypatch.setattr(Agent, "broken", False)
    it = nixl.NixlTransport("m")
    monkeypatch.setattr(it, "_open", lambda peer: Link())
    before = it.connect(None)
    assert before.lost == []
    monkeypatch.setattr(Agent, "broken", True)
    until(lambda: before.lost)
    assert "Bug" in before.lost[0]
    assert it.connect(None).lost == before.lost
    it.close()
    assert it.is_gone


def test_a_transport_that_does_not_let_go_holds_nobody_up(monkeypatch):
    said = []
    monkeypatch.setattr(provider, "RELEASE_S", 0.05)
    monkeypatch.setattr(transfer_thread, "JOIN_S", 0.05)
    monkeypatch.setattr(provider.log, "error", lambda event, **fields: said.append(event))
    goes_on = threading.Event()

    class Stuck(BaseTransport):
        path = PathName.NIXL

        def _release(self):
            goes_on.wait(60)

    it = Stuck("m")
    it.close()
    assert said == ["transport_not_released"]
    goes_on.set()


class Background:
    """Of a link: does what is asked when it is told to."""

    def __init__(self):
        self.ran = []

    def run(self, work, then):
        self.ran.append(work)


async def test_a_path_whose_word_the_link_does_not_take_fails_and_is_made_anew():
    background, pulled = Background(), []
    owner = SimpleNamespace(pulled=lambda *how: pulled.append(how), settled=None)
    link = PeerLink("tcp://127.0.0.1:1", SimpleNamespace(instance="m"), owner, background, silent_ms=1_000)
    path = ReaderPath(1, 1, owner.pulled, owner.settled, lambda path: None)
    path.end = SimpleNamespace(lost=lambda reason: None, close=lambda: True)
    link._slots[7] = Slot(path)
    link._say = lambda message: True
    link._send_bytes(7, path, b"x")
    assert not path.failed
    link._say = lambda message: False
    link._send_bytes(7, path, b"x")
    assert path.failed
    assert link._slots[7].path is None
    assert background.ran == [path.end.close], "its agent goes, and its pages settle"
    link.close()
