"""A peer that does not read, or has many paths made, is told or ended, and takes nothing from the others."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from services.mempool import peer_background
from services.mempool.core.actions import AskPeer
from services.mempool.peer_background import Background
from services.mempool.peer_links import PeerLink, Slot
from services.mempool.peer_paths import ReaderPath
from services.mempool.peers import MAX_PATHS, Peers
from shared.errors import Overloaded
from shared.ids import Epoch
from shared.transport.clock import MonotonicClock
from shared.wire import mempool_peer


class Server:
    """RouterServer's, to peers that do not read."""

    def __init__(self) -> None:
        self.sent, self.ended, self.accepted, self.is_full = [], [], [], False

    def send(self, identity, message):
        if self.is_full:
            raise Overloaded("a peer does not read")
        self.sent.append((identity, message))

    def disconnect(self, identity):
        self.ended.append(identity)

    def accept(self, identity):
        self.accepted.append(identity)


class Waiting:
    """Background that does what is asked when it is told to."""

    def __init__(self) -> None:
        self.asked, self.owners = [], set()

    def make(self, name, spaces, then, *, may_send=None, is_wanted=lambda: True, owner=0):
        self.asked.append(lambda: then(End() if is_wanted() else None, "not wanted"))
        self.owners.add(owner)

    def run(self, work, then, owner=0):
        self.asked.append(lambda: then(work(), None))
        self.owners.add(owner)

    def do(self) -> None:
        asked, self.asked = self.asked, []
        for each in asked:
            each()

    def close(self) -> None:
        pass


class End:
    """A path's; `num` of them are there."""

    num, description = 0, b""

    def __init__(self) -> None:
        End.num += 1
        self.num_connects = 0

    def connect(self, *_args) -> None:
        self.num_connects += 1

    def lost(self, _reason) -> None:
        pass

    def close(self) -> bool:
        End.num -= 1
        return True


@pytest.fixture
async def peers(monkeypatch):
    described = SimpleNamespace(content_key="k", family_key="k")
    spaces = SimpleNamespace(memories={0: None}, description_of=lambda _: described)
    api = SimpleNamespace(peers=SimpleNamespace(addresses=()))
    returns = SimpleNamespace(is_on=True)
    core = SimpleNamespace(
        boot_generation=Epoch(1), on_peer_gone=lambda *_: [], on_peer_lost=lambda *_: [], api=api,
        returns=returns, remote=SimpleNamespace(pulls={}),
    )  # fmt: skip
    it = Peers(
        "tcp://127.0.0.1:0", "a", core, spaces, MonotonicClock(), lambda _: None, SimpleNamespace(),
        max_peers=2, pins_memory=False, silent_ms=1_000,
    )  # fmt: skip
    it._background.close()
    it._server, it._background = Server(), Waiting()
    monkeypatch.setattr(it, "_host_space", lambda _: SimpleNamespace(ranks=[], end=None))
    monkeypatch.setattr(End, "num", 0)
    return it


def say(peers, identity, message):
    peers._on_call(identity, 0, message, [])


def hello(**fields):
    return mempool_peer.PeerHello(instance="b", boot_generation=1, **fields)


async def test_a_peer_that_is_refused_and_does_not_read_loses_its_connection_and_that_is_all(peers):
    peers._server.is_full = True
    say(peers, b"1", hello(version=2))
    assert peers._server.ended == [b"1"]
    peers._server.is_full = False
    say(peers, b"2", hello())
    say(peers, b"3", hello())
    peers._server.is_full = True
    say(peers, b"4", hello())  # one too many
    assert peers._server.ended == [b"1", b"4"]


async def test_no_connection_is_made_for_a_word_about_blocks_to_go_back(peers):
    hint = mempool_peer.BlocksCompleted(handoff_id="h", address="a", parent=b"", hashes=b"")
    peers.ask(AskPeer("tcp://10.0.0.1:1", hint))
    assert not peers._links


async def test_a_peer_is_refused_once_on_a_connection(peers):
    say(peers, b"1", hello(version=2))
    assert peers._server.ended == [], "its link would make another connection at once"
    say(peers, b"1", hello(version=2))
    assert peers._server.ended == [b"1"]
    assert [type(message) for _, message in peers._server.sent] == [mempool_peer.PeerRefused]
    peers._on_reader_lost(b"1")
    assert not peers._refused


async def test_only_a_peer_whose_hello_was_taken_may_stay(peers):
    say(peers, b"1", hello(version=2))
    say(peers, b"2", mempool_peer.WhoIsHere())
    for each in (b"3", b"4", b"5"):  # one too many
        say(peers, each, hello())
    assert peers._server.accepted == [b"3", b"4"]


def links_of(peers, monkeypatch) -> tuple[list[str], list[str]]:
    """Addresses of links that were closed, and those of which the core was told."""
    closed, told = [], []

    def make(address, *_):
        return SimpleNamespace(
            num_pulls=0, num_in_doubt=0, address=address, used_s=len(closed),
            close=lambda: closed.append(address),
        )  # fmt: skip

    monkeypatch.setattr("services.mempool.peers.PeerLink", make)
    peers._core.on_peer_lost = lambda address, _now_ms: [told.append(address)]
    return closed, told


async def test_links_by_which_callers_may_hold_pages_are_not_closed_to_make_room(peers, monkeypatch):
    closed, _ = links_of(peers, monkeypatch)
    peers._core.api.peers.addresses = ("tcp://10.0.0.1:1",)
    for number in (1, 2, 3, 4):
        assert peers._link(f"tcp://10.0.0.{number}:1") is not None
    assert closed == ["tcp://10.0.0.2:1", "tcp://10.0.0.3:1"]
    peers._core.api.peers.addresses = ("tcp://10.0.0.1:1", "tcp://10.0.0.4:1")
    assert peers._link("tcp://10.0.0.5:1") is None
    assert peers._link("tcp://10.0.0.1:1") is not None


async def test_links_on_which_an_answer_is_awaited_are_not_closed_to_make_room(peers, monkeypatch):
    """Asked for blocks, or for their epochs: no bytes are on their way, but readers wait for all of their time."""
    closed, told = links_of(peers, monkeypatch)
    pulls = peers._core.remote.pulls
    for number in (1, 2):
        pulls[number] = SimpleNamespace(address=f"tcp://10.0.0.{number}:1")
        assert peers._link(pulls[number].address) is not None
    assert peers._link("tcp://10.0.0.3:1") is None
    del pulls[1]
    assert peers._link("tcp://10.0.0.3:1") is not None
    assert closed == told == ["tcp://10.0.0.1:1"], "who closes a link tells the core"


def open_path(peers, number):
    say(peers, b"1", mempool_peer.OpenPath(path_id=number, content_key="k", description=b""))


async def test_paths_that_are_closed_count_until_they_are_destroyed(peers):
    say(peers, b"1", hello())
    for number in range(MAX_PATHS):
        open_path(peers, number)
        say(peers, b"1", mempool_peer.ClosePath(path_id=number))
    open_path(peers, 900)
    assert peers._server.sent[-1][1].path_id == 900
    assert isinstance(peers._server.sent[-1][1], mempool_peer.PathFailed)
    assert len(peers._background.asked) == MAX_PATHS
    peers._background.do()  # none of them is made
    assert End.num == 0
    assert not peers._background.asked
    open_path(peers, 0)
    peers._background.do()
    peers._background.do()
    assert isinstance(peers._server.sent[-1][1], mempool_peer.PathOpened)
    say(peers, b"1", mempool_peer.ClosePath(path_id=0))
    peers._background.do()
    (reader,) = peers._readers.values()
    assert (End.num, reader.num_ends) == (0, 0)
    assert peers._background.owners == {reader.number}


async def test_a_path_that_was_closed_before_it_was_made_does_not_end_the_next_one_of_its_number(peers):
    say(peers, b"1", hello())
    open_path(peers, 5)
    say(peers, b"1", mempool_peer.ClosePath(path_id=5))
    open_path(peers, 5)
    peers._background.do()
    peers._background.do()
    assert [type(message) for _, message in peers._server.sent[1:]] == [mempool_peer.PathOpened]


async def test_a_peer_with_many_paths_does_not_keep_others_waiting_for_all_of_them():
    background, begin, done = Background(), threading.Event(), []
    background.run(lambda: begin.wait(30), lambda *_: None)
    for number in range(20):
        background.run(lambda number=number: done.append((1, number)), lambda *_: None, 1)
    background.run(lambda: done.append((2, 0)), lambda *_: None, 2)
    background.run(lambda: done.append((2, 1)), lambda *_: None, 2)
    begin.set()
    background.close()
    assert done[:5] == [(1, 0), (2, 0), (1, 1), (2, 1), (1, 2)]
    assert done[4:] == [(1, number) for number in range(2, 20)], "in order for one"


@pytest.fixture
def made(monkeypatch) -> list[str]:
    """Names of ends, as they are made; `Made.opened` and `Made.closed` are set when one is, and is closed."""

    class Made:
        proceed, opened = threading.Event(), threading.Event()
        closed: list[str] = []

        def __init__(self, name, _regions, *, may_send) -> None:
            self.name = name
            names.append(name)
            Made.opened.set()
            Made.proceed.wait(30)

        def close(self) -> bool:
            Made.closed.append(self.name)
            return True

    names: list[str] = []
    monkeypatch.setattr(peer_background, "PathEnd", Made)
    return names


async def test_an_end_that_nobody_wants_any_more_is_not_made(made):
    peer_background.PathEnd.proceed.set()
    told, background = asyncio.Queue(), Background()
    background.make("a", {}, lambda *how: told.put_nowait(how), is_wanted=lambda: False)
    background.make("b", {}, lambda *how: told.put_nowait(how))
    found = [await told.get(), await told.get()]
    assert made == ["b"]
    assert [(end is None, reason) for end, reason in found] == [(True, ""), (False, "")]
    background.close()
    background.run(lambda: None, lambda _, error: told.put_nowait(error))  # closed: said, later
    assert isinstance(await told.get(), RuntimeError)
    assert not peer_background.PathEnd.closed, "who has it closes it"


async def test_an_end_that_is_made_while_all_ends_is_closed_and_the_next_not_made(made):
    """Nobody would hear of it: the peer could write into memory that is unmapped."""
    told, background = [], Background()
    for name in ("a", "b"):
        background.make(name, {}, lambda *how: told.append(how))
    assert await asyncio.to_thread(peer_background.PathEnd.opened.wait, 30)
    threading.Timer(0.02, peer_background.PathEnd.proceed.set).start()
    background.close()
    assert (made, peer_background.PathEnd.closed) == (["a"], ["a"])
    await asyncio.sleep(0)
    assert [end for end, _ in told] == [None, None]


async def test_an_end_that_was_made_and_not_heard_of_when_all_ended_is_closed(made):
    peer_background.PathEnd.proceed.set()
    told, background = [], Background()
    background.make("a", {}, lambda *how: told.append(how))
    assert peer_background.PathEnd.opened.wait(30), "on the loop, which hears nothing meanwhile"
    background.close()
    assert peer_background.PathEnd.closed == ["a"]
    await asyncio.sleep(0)
    assert [end for end, _ in told] == [None]


def link_of(background, lost=None):
    owner = SimpleNamespace(pulled=None, settled=None, lost=lost)
    return PeerLink("tcp://127.0.0.1:1", hello(), owner, background, silent_ms=1_000)


async def test_a_peer_that_says_again_that_a_path_is_open_does_not_have_it_connected_again():
    background = Waiting()
    link = link_of(background)
    path = ReaderPath(1, SimpleNamespace(ranks=[]), lambda *_: None, lambda *_: None, lambda _: None)
    path.end = end = End()
    link._slots[7] = Slot(path)
    opened = mempool_peer.PathOpened(path_id=1, description=b"")
    link._on_message(0, opened, [])
    link._on_message(0, opened, [])  # while it is being connected
    background.do()
    link._on_message(0, opened, [])  # and after that
    background.do()
    assert end.num_connects == 1
    assert path.ready
    link.close()


async def test_a_peer_that_takes_no_message_when_its_link_is_up_is_lost():
    lost = []
    link = link_of(Waiting(), lost.append)

    def full(_message):
        raise Overloaded("full")

    link._link.up, link._link.send = True, full
    link._on_up()
    assert lost == [link.address]
    link.close()
