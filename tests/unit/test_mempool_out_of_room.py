"""Where descriptors or memory run out, one that needs them is told, or ended, and nothing is left open."""

import asyncio
import errno
import logging
import mmap
import os
import socket
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest

from services.mempool import shell
from services.mempool.core import space
from services.mempool.core.actions import Disconnect, PoolLimits, Send
from services.mempool.descriptors import of_memory
from services.mempool.kept import Kept
from services.mempool.memory import PoolMemory
from services.mempool.mover_layers import LayerMemory
from services.mempool.outbox import Outbox
from services.mempool.shell import MempoolShell
from shared.errors import InstanceUnknown, OutOfPages, PeerGone, ResourceError
from shared.ids import Epoch, InstanceId, SpaceId
from shared.mempool import rank_memory
from shared.mempool.api import MemPoolApi
from shared.mempool.caller_memory import CallerMemory
from shared.mempool.page_quota import PageQuota
from shared.mempool.rank_memory import CONTEXT_BYTES, RankMemory, pages_bytes
from shared.transport import unix_socket
from shared.transport.clock import MonotonicClock
from shared.transport.unix_channel import ACCEPT_PAUSE_S, UnixLink, UnixServer
from shared.transport.unix_socket import OutOfDescriptors
from shared.vmm.errors import VmmError
from shared.vmm.interface import Op
from shared.vmm.mapper import ThreadMapper
from shared.wire import mempool as wire
from shared.wire.mempool_callers import AttachCaller, CallerAttached
from tests.unit.mempool_harness import DESCRIPTION, SEED

ATTACHED = wire.Attached(boot_generation=Epoch(1), attachment=1)
MATCHED = wire.Matched(call_id=9, num_blocks=0)


def no_room(*_args, **_how):
    raise OSError(errno.EMFILE, "Too many open files")


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  the condition is another object's state
            await asyncio.sleep(0.001)


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def dups_left(monkeypatch):
    """os.dup() fails after as many as the test says."""
    real, left = os.dup, [1 << 30]

    def dup(fd):
        left[0] -= 1
        return real(fd) if left[0] >= 0 else no_room()

    monkeypatch.setattr(os, "dup", dup)
    return left


# -- descriptors ----------------------------------------------------------------------------------------


@pytest.fixture
async def pair(tmp_path):
    """A server, a client's link, the server's connection to it, and what came."""
    came: list[object] = []
    server = UnixServer(
        tmp_path / "s", into=wire.TO_MEMPOOL, out=wire.FROM_MEMPOOL, on_message=lambda *_: None
    )
    await server.start()

    def on_message(_seq, message, _raw, fds):
        came.append(message)
        unix_socket.close_fds(fds)

    link = UnixLink(tmp_path / "s", out=wire.TO_MEMPOOL, into=wire.FROM_MEMPOOL, on_message=on_message)
    await link.connect()
    await until(lambda: server.connections)
    yield SimpleNamespace(server=server, link=link, came=came, connection=next(iter(server.connections)))
    link.close()
    server.close()


async def test_a_message_whose_descriptors_cannot_be_copied_is_not_sent_and_leaves_none_open(pair, dups_left):
    before = num_open()
    dups_left[0] = 1
    with pytest.raises(OutOfDescriptors, match=r"Too many open files; RLIMIT_NOFILE is \d+"):
        pair.connection.send(MATCHED, fds=[0, 1])
    assert num_open() == before
    dups_left[0] = 2
    pair.connection.send(ATTACHED, fds=[0, 1])
    await until(lambda: pair.came)
    assert pair.came == [ATTACHED]


async def test_a_server_without_descriptors_does_not_ask_for_its_clients_all_the_time(pair, caplog):
    class Listener:
        """The server's, of a process that has no descriptor left."""

        num_asked, is_full = 0, True

        def __init__(self, real: socket.socket) -> None:
            self.fileno, self.close, self._accept = real.fileno, real.close, real.accept

        def accept(self):
            self.num_asked += 1
            return no_room() if self.is_full else self._accept()

    listener = pair.server._listener = Listener(pair.server._listener)
    late = socket.socket(socket.AF_UNIX)
    with caplog.at_level(logging.WARNING):
        begun_s = time.monotonic()
        late.connect(str(pair.server.path))
        await until(lambda: listener.num_asked >= 2)
        await asyncio.sleep(0.35)
    assert listener.num_asked <= 2 + (time.monotonic() - begun_s) / ACCEPT_PAUSE_S
    assert [r.message for r in caplog.records].count(
        f"{pair.server.path}: clients wait: [Errno {errno.EMFILE}] Too many open files"
    ) == 1  # fmt: skip
    listener.is_full = False
    await until(lambda: len(pair.server.connections) == 2)
    late.close()


class Connection:
    def __init__(self, error: Exception | None = None) -> None:
        self.sent, self.is_closed, self.error = [], False, error

    def send(self, message, fds=()):
        if fds and self.error is not None:
            raise self.error
        self.sent.append(message)

    def close(self):
        self.is_closed = True


CALLER = CallerAttached(boot_generation=Epoch(1), num_pages=1, page_bytes=1)


@pytest.mark.parametrize("message", [ATTACHED, CALLER])
@pytest.mark.parametrize("lacks", ["to make", "to send"])
def test_who_attaches_when_there_is_no_descriptor_for_it_is_refused(message, lacks):
    def descriptors(_space, _reads_only):
        if lacks == "to make":
            raise OutOfDescriptors("none left")
        return [os.dup(0)]

    before = num_open()
    outbox = Outbox(SimpleNamespace(descriptors=descriptors), SimpleNamespace(), 8)
    one = outbox.connections[1] = Connection(OutOfDescriptors("none left"))
    outbox.send(Send(1, message, with_memory=True))
    assert one.sent == [wire.AttachRefused(code="descriptors.exhausted", reason="none left")]
    assert one.is_closed
    assert num_open() == before


def test_what_a_driver_does_not_export_ends_the_connection_that_waits_for_it():
    outbox = Outbox(SimpleNamespace(), SimpleNamespace(), 8)
    one, two = outbox.connections[1], outbox.connections[2] = Connection(), Connection()

    def export():
        raise ResourceError("cuMemExportToShareableHandle: CUDA_ERROR_OPERATING_SYSTEM")

    outbox.give(1, export)
    outbox.give(2, lambda: (MATCHED, [os.dup(0)]))
    assert (one.sent, one.is_closed) == ([], True)
    assert (two.sent, two.is_closed) == ([MATCHED], False)


def test_of_slabs_and_of_memory_all_descriptors_are_made_or_none(dups_left):
    memory = PoolMemory(1, 4096, Epoch(1))
    before = num_open()
    slabs = SimpleNamespace(export=os.dup)
    for make in (
        lambda: unix_socket.opened(slabs.export, [0, 1, 2]),
        lambda: of_memory(memory, table_only=False, reads_only=False),
    ):
        dups_left[0] = 1
        with pytest.raises(OutOfDescriptors):
            make()
    dups_left[0] = 0
    with pytest.raises(OutOfDescriptors):
        of_memory(memory, table_only=False, reads_only=True)
    assert num_open() == before
    memory.close()


@pytest.mark.parametrize("make", [lambda: PoolMemory(1, 4096, Epoch(1)), LayerMemory])
def test_memory_that_lacks_its_last_descriptor_leaves_none_open(make, monkeypatch):
    before = num_open()
    monkeypatch.setattr(mmap, "mmap", no_room)  # which takes one of its own
    with pytest.raises(OSError, match="Too many"):
        make()
    assert num_open() == before


def test_a_process_that_there_is_no_descriptor_for_is_not_kept_and_nothing_else_happens(dups_left):
    kept = Kept("", Epoch(1))
    dups_left[0] = 0
    kept.process(7, 0, "engine", "e")
    kept.caller(8, 0, [0])
    kept.dead(7)
    dups_left[0] = 1
    kept.process(7, 0, "engine", "e")
    kept.process(7, 0, "rank", "e")  # by the same copy
    assert kept._processes[7][1].maps
    kept.dead(7)


async def test_without_room_nobody_attaches_but_a_caller_that_says_it_copies_no_more_is_heard(
    tmp_path, monkeypatch
):
    one = MempoolShell(tmp_path / "m", PoolLimits(capacity_bytes=1 << 20), Epoch(1), MonotonicClock())
    monkeypatch.setattr(one._processes, "number_of", lambda _: 1)
    monkeypatch.setattr(shell, "shortage", lambda: "1 of 32 are left")
    connection = SimpleNamespace(state=1, peer=SimpleNamespace(pid=1))

    def codes(message):
        said, end = one._attach(connection, message)
        assert isinstance(end, Disconnect)
        return said.message.code

    caller = {"instance": InstanceId("c"), "pages_of": InstanceId("e"), "space": 5}
    for kind in ("engine", "rank"):
        assert codes(wire.Attach(kind=kind, instance=InstanceId("e"))) == "descriptors.exhausted"
    assert codes(AttachCaller(**caller)) == "descriptors.exhausted"
    assert codes(AttachCaller(**caller, memory_id=Epoch(3))) == "caller.unsupported"
    (attached,) = one._attach(connection, wire.Attach(kind="client", instance=InstanceId("e")))
    assert isinstance(attached.message, wire.Attached), "it needs none"
    one.close()


async def test_a_caller_whose_death_nobody_could_tell_is_not_served(tmp_path, monkeypatch):
    """It was, and when it left its pages were free while it might still copy into them."""
    one = MempoolShell(
        tmp_path / "m",
        PoolLimits(capacity_bytes=1 << 20),
        Epoch(1),
        MonotonicClock(),
        api_path=tmp_path / "a",
    )
    await one.start()
    api = MemPoolApi(tmp_path / "a", InstanceId("c"), seed=SEED, block_tokens=4)
    with monkeypatch.context() as patch:
        patch.setattr(one._processes, "number_of", lambda _: None)
        await api.connect()
        with pytest.raises(PeerGone):
            await api.alloc_mem(1)
    await api.connect()
    with pytest.raises(InstanceUnknown):
        await api.alloc_mem(1)
    api.close()
    one.close()


# -- refused by a mempool's successor ------------------------------------------------------------------------


class Link:
    """To a mempool that answers each Attach as the test says."""

    up = True

    def __init__(self, answers: list[object]) -> None:
        self._answers, self.num_sent, self.is_started = answers, 0, False

    def connect(self) -> None:
        pass

    def call(self, _message, *, timeout_ms):
        answer = self._answers.pop(0)
        fds = [os.dup(0), os.dup(0)] if isinstance(answer, wire.Attached) else []
        return answer, [], fds

    def start(self) -> None:
        self.is_started = True

    def close(self) -> None:
        self.is_started = False


def answers(*codes: str) -> list[object]:
    refused = [wire.AttachRefused(code=code, reason="") for code in codes]
    return [msgspec.structs.replace(ATTACHED, memory_id=Epoch(1)), *refused]


def stays_attached(monkeypatch, folder, make_link):
    """(the memory, its thread, its links so far, each made of how many there were)."""
    links: list[Link] = []

    def new_link(_self):
        links.append(make_link(len(links)))
        return links[-1]

    monkeypatch.setattr(RankMemory, "_new_link", new_link)
    memory = RankMemory(folder / "m", InstanceId("e"), DESCRIPTION, 0)
    others = set(threading.enumerate())
    memory.stay_attached()
    (thread,) = set(threading.enumerate()) - others
    return memory, thread, links


PASSING = ("descriptors.exhausted", "pages.exhausted", "peer.credentials")


@pytest.mark.parametrize(("codes", "is_back"), [(PASSING, True), ((*PASSING[:1], "memory.replaced"), False)])
async def test_a_rank_that_is_refused_for_what_may_pass_attaches_again(monkeypatch, tmp_path, codes, is_back):
    """Its thread ended with the first refusal: the mempool killed it for its silence, or never served its engine."""
    monkeypatch.setattr(rank_memory, "REFUSED_RETRY_S", 0.0)
    said = [*answers(*codes), ATTACHED]
    memory, thread, links = stays_attached(monkeypatch, tmp_path, lambda _: Link(said))
    memory._down.set()
    await until(lambda: links[-1].is_started and len(links) > 1 if is_back else not thread.is_alive())
    assert len(said) == (0 if is_back else 1)
    memory.close()


def test_an_engine_that_is_refused_for_what_may_pass_does_not_begin_anew(monkeypatch, tmp_path):
    said = [*answers(*PASSING), ATTACHED, *answers("memory.replaced")[1:]]
    monkeypatch.setattr(PageQuota, "_new_link", lambda _self: Link(said))
    quota = PageQuota(tmp_path / "m", InstanceId("e"), DESCRIPTION, 4)
    quota.attach()
    assert [quota.reattach(wire.Holding()) for _ in range(4)] == [False, False, False, True]
    with pytest.raises(ResourceError, match="does not know this engine"):
        quota.reattach(wire.Holding())


def test_a_caller_that_has_left_says_so_until_it_is_heard():
    memory = object.__new__(CallerMemory)
    memory._listening, memory._quiet = False, lambda: None
    memory._attach = AttachCaller(instance=InstanceId("c"), pages_of=InstanceId("e"), space=SpaceId(0))
    said = answers(*PASSING, "memory.replaced")[1:]
    told = []
    while said:
        memory._link = Link(said)  # pyright: ignore[reportAttributeAccessIssue]
        memory._link.up = False
        told.append(memory._tell_once())
    assert told == [False, False, False, True]


# -- the mapper without numba -----------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["apply", "prepare_thread"])
def test_who_waits_for_a_mapper_hears_at_once_that_it_has_no_memory(where):
    def fails(*_args):
        raise OutOfPages("cuMemMap: CUDA_ERROR_OUT_OF_MEMORY")

    calls = {"apply": lambda _: None, "prepare_thread": lambda: None, where: fails}
    mapper = ThreadMapper(SimpleNamespace(**calls))
    with pytest.raises(VmmError, match=r"failed in the background: cuMemMap"):
        mapper.wait(mapper.submit([Op(1, 2, 3, 4, 5)]), 5.0)
    with pytest.raises(VmmError, match="cuMemMap"):
        mapper.submit([Op(1, 2, 3, 4, 5)])
    mapper.close()


@pytest.mark.parametrize("device", ["cpu", "cuda:" + "ab" * 16])
@pytest.mark.parametrize("given", [-1, -(128 << 20), 1])
def test_who_has_no_room_for_a_page_is_told_so(device, given):
    attach = wire.Attach(
        kind="rank", instance=InstanceId("x"), description=DESCRIPTION, device=device, capacity_bytes=given
    )
    planned = space.plan(DESCRIPTION, attach, PoolLimits(capacity_bytes=1 << 30))
    assert planned.num_pages == 0
    assert f"capacity_bytes {given} is less than a page" in planned.shortage


@pytest.mark.parametrize("found_bytes", [-1, 0, CONTEXT_BYTES])
def test_an_engine_without_room_for_pages_on_its_gpu_says_what_to_set(found_bytes):
    with pytest.raises(ResourceError, match="set a larger kv_cache_bytes"):
        pages_bytes(found_bytes)
    assert pages_bytes(CONTEXT_BYTES + 1) == 1
