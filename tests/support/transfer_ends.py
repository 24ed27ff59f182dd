"""Two ends of a transfer in two processes: this one pulls, a child serves. Every page has a verifiable pattern."""

import array
import contextlib
import fcntl
import itertools
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shared.errors import PeerGone
from shared.ids import Epoch
from shared.kernels.copy_pages.cuda_copier import CudaCopier
from shared.kv.page import PageState, pack_word
from shared.kv.page_table import HEADER_WORDS, table_bytes
from shared.transfer.alias import AliasTransport
from shared.transfer.config import TransferSettings, apply_ucx_environment
from shared.transfer.imported import ImportedTransport
from shared.transfer.interface import MappedPages, Peer, Region, RegionKind
from shared.transfer.nccl import NcclTransport
from shared.transfer.nixl import NixlTransport
from shared.transfer.page_stream import PageStream
from shared.transfer.shm import ShmTransport
from shared.transfer.staged import StagedTransport
from shared.transfer.ucxx_provider import UcxxTransport
from tests.support.fake_mover_gpus import FakeGpus
from tests.support.socket_nccl import SocketNccl

PAGE_BYTES = 256 << 10
NUM_PAGES = 64
NUM_SLOTS = 8
PAGES_REWRITTEN = [5, 4, 9, 10, 11, 40, 0]
ROOT = Path(__file__).resolve().parents[2]
HEAD = struct.Struct("<cI")


class HostRegion:
    """A sealed memfd, mapped."""

    def __init__(
        self, name: str, *, page_bytes: int = PAGE_BYTES, num_pages: int = NUM_PAGES, fd: int = -1
    ) -> None:
        length = page_bytes * num_pages
        if fd < 0:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, length)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.map = mmap.mmap(fd, length)
        self.bytes = np.frombuffer(self.map, np.uint8).reshape(num_pages, page_bytes)
        self.region = Region(
            name=name,
            kind=RegionKind.HOST,
            address=int(self.bytes.ctypes.data),
            page_bytes=page_bytes,
            num_pages=num_pages,
            memory_key=f"inode:{os.fstat(fd).st_ino}",
            fd=fd,
        )

    def close(self) -> None:
        del self.bytes
        with contextlib.suppress(BufferError):
            self.map.close()
        os.close(self.region.fd)


def pattern(page: int, seed: int = 1, page_bytes: int = PAGE_BYTES) -> np.ndarray:
    """What page `page` holds after fill(seed)."""
    return np.random.default_rng((seed, page)).integers(0, 256, page_bytes, np.uint8)


def as_registered(kind: str, region: Region, device: int) -> Region:
    """The memory of an end, said to be a GPU's where the path is for GPUs."""
    if kind not in ("imported", "nccl"):
        return region
    return replace(region, kind=RegionKind.CUDA_PAGES, device=device, device_uuid=FakeGpus.device(device))


def fill(region: HostRegion, seed: int) -> None:
    for page in range(region.region.num_pages):
        region.bytes[page] = pattern(page, seed, region.region.page_bytes)


class SocketChannel:
    """interface.Channel over a socket; frames of [kind][length][body]."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._lock = threading.Lock()

    def send(self, message: bytes) -> None:
        self.frame(b"M", message)

    def frame(self, kind: bytes, body: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        head = HEAD.pack(kind, len(body))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            with self._lock:
                self.sock.sendmsg([head], rights)
                self.sock.sendall(body)
        except OSError as error:
            raise PeerGone(str(error)) from error

    def receive(self) -> tuple[bytes, bytes, list[int]]:
        """Raises: EOFError."""
        fds = array.array("i")
        head, ancillary, _, _ = self.sock.recvmsg(HEAD.size, socket.CMSG_SPACE(16), socket.MSG_WAITALL)
        for _, _, data in ancillary:
            fds.frombytes(data)
        if len(head) < HEAD.size:
            raise EOFError
        kind, length = HEAD.unpack(head)
        body = b""
        while len(body) < length:
            part = self.sock.recv(length - len(body))
            if not part:
                raise EOFError
            body += part
        return kind, body, list(fds)


class Table:
    """A page table in a memfd, as words."""

    def __init__(self, fd: int) -> None:
        self.map = mmap.mmap(fd, table_bytes(NUM_PAGES))
        self.words = memoryview(self.map).cast("Q")

    def write(self, page: int, epoch: int, state: PageState) -> None:
        self.words[HEADER_WORDS + page] = pack_word(Epoch(epoch), state)


def rewrite_until_told(theirs: HostRegion, table: Table, channel: SocketChannel, on_message: Any) -> None:
    """New bytes under a new epoch, page by page, until an order comes; then the first bytes again."""
    for seed in itertools.count(2):
        for page in PAGES_REWRITTEN:
            while select.select([channel.sock], [], [], 0)[0]:
                order, body, _ = channel.receive()
                if order != b"M":
                    for each in PAGES_REWRITTEN:
                        rewrite(theirs, table, each, 1)
                    return
                on_message(body)
            rewrite(theirs, table, page, seed)


def rewrite(theirs: HostRegion, table: Table, page: int, seed: int) -> None:
    bytes_now = pattern(page, seed)
    table.write(page, seed, PageState.WRITING)
    theirs.bytes[page] = bytes_now
    table.write(page, seed, PageState.SEALED)


def make_transport(kind: str, instance: str, **extra: Any) -> Any:
    """A provider by the name of its case."""
    if kind == "alias":
        return AliasTransport(instance, **extra)
    if kind.startswith("shm"):
        return ShmTransport(instance, threads=int(kind.partition("-")[2] or 2), push=True, **extra)
    if kind == "staged":
        staging = HostRegion(f"{instance}-slots", num_pages=NUM_SLOTS)
        transport = StagedTransport(instance, staging.region, **extra)
        transport.staging_memory = staging  # keeps the mapping alive
        return transport
    if kind == "ucxx":
        return UcxxTransport(instance, **extra)
    if kind == "nccl":
        library = SocketNccl()
        return NcclTransport(instance, library, library, **extra)  # type: ignore[arg-type]  # what it needs of a driver
    if kind == "imported":
        driver = FakeGpus().open(FakeGpus.device(0)).copy  # moves ordinary memory; the rest is the real thing
        copier, stream = CudaCopier(driver), driver.create_stream()
        return ImportedTransport(
            instance, lambda *_: (copier, stream), page_stream=PageStream(driver), **extra
        )
    mode = kind.partition("-")[2].partition("-")[0] or "auto"
    return NixlTransport(instance, mode=mode, **extra)


class Ends:
    """The pulling end here, and the process that serves."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.settled: list[tuple[str, tuple[int, ...]]] = []
        self.lost: list[tuple[str, str]] = []
        tls = "tcp" if kind.endswith("tcp") else ""
        ours, theirs = socket.socketpair()
        self.mine = HostRegion("mine")
        shared_fd = self.mine.region.fd if kind == "alias" else -1
        command = [sys.executable, "-m", "tests.support.transfer_ends", kind, str(theirs.fileno()), tls]
        if shared_fd >= 0:
            command.append(str(shared_fd))
        fds = [theirs.fileno(), *([shared_fd] if shared_fd >= 0 else [])]
        self.process = subprocess.Popen(command, cwd=ROOT, pass_fds=fds)
        theirs.close()
        self._sock = ours
        self.channel = SocketChannel(ours)
        apply_ucx_environment(TransferSettings())
        self.transport = make_transport(kind, "puller")
        self.transport.on_peer_lost(lambda instance, reason: self.lost.append((instance, reason)))
        self.transport.register(as_registered(kind, self.mine.region, 0))
        self._shake_hands()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _shake_hands(self) -> None:
        kind, description, fds = self.channel.receive()
        assert kind == b"D", kind
        self._table = Table(fds[-1])
        os.close(fds.pop())
        self.words = self._table.words
        names = ["server-slots"] if self.kind == "staged" else ["theirs"]
        mapped = {}
        if self.kind == "imported":  # what link-up does with each handle
            self.imported = HostRegion("theirs", fd=fds.pop())
            names, mapped = [], {"theirs": MappedPages(self.imported.region.address, device=1)}
        self.channel.frame(b"D", self.transport.describe(), self._own_fds())
        self.link = self.transport.connect(
            Peer(
                description=description,
                fds=dict(zip(names, fds, strict=True)),
                mapped=mapped,
                channel=self.channel,
                on_settled=lambda region, pages: self.settled.append((region, pages)),
            )
        )
        assert self.channel.receive()[0] == b"R"

    def _own_fds(self) -> tuple[int, ...]:
        staging = getattr(self.transport, "staging_memory", None)
        return (staging.region.fd,) if staging is not None else ()

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                kind, body, _ = self.channel.receive()
                if kind == b"M":
                    self.link.on_message(body)

    def _watch(self) -> None:
        """What the mempool's shell does: a pidfd proves death."""
        pidfd = os.pidfd_open(self.process.pid)
        try:
            select.select([pidfd], [], [])
        finally:
            os.close(pidfd)
        self.link.peer_dead()

    def word(self, page: int) -> int:
        return self.words[HEADER_WORDS + page]

    def order(self, kind: bytes, body: bytes = b"") -> None:
        self.channel.frame(kind, body)

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.go_on()
        self.process.kill()
        self.process.wait(60)
        self._watcher.join(60)
        self.transport.close()
        self._sock.close()
        self._reader.join(60)


def serve(kind: str, fd: int, tls: str, shared_fd: int) -> None:
    """The child: one region with pattern 1, served until the socket ends."""
    apply_ucx_environment(TransferSettings(ucx_tls=tls))
    channel = SocketChannel(socket.socket(fileno=fd))
    theirs = HostRegion("theirs", fd=shared_fd)
    fill(theirs, 1)
    transport = make_transport(
        kind, "server", **({"may_send": may_send} if kind[:4] in ("stag", "nixl", "ucxx", "nccl") else {})
    )
    transport.register(as_registered(kind, theirs.region, 1))
    staging = getattr(transport, "staging_memory", None)
    fds = (staging.region.fd,) if staging is not None else (theirs.region.fd,)
    table_fd = os.memfd_create("table", os.MFD_CLOEXEC)
    os.ftruncate(table_fd, table_bytes(NUM_PAGES))
    table = Table(table_fd)
    for page in range(NUM_PAGES):
        table.write(page, 1, PageState.SEALED)
    channel.frame(b"D", transport.describe(), (*fds, table_fd))
    _, description, received = channel.receive()
    names = ["puller-slots"][: len(received)]
    peer = Peer(description=description, fds=dict(zip(names, received, strict=True)), channel=channel)
    link = None
    with contextlib.suppress(Exception):
        link = transport.connect(peer)
    channel.frame(b"R")
    while True:
        order, body, _ = channel.receive()
        if order == b"M" and link is not None:
            link.on_message(body)
        elif order == b"W":
            rewrite_until_told(theirs, table, channel, lambda body: link and link.on_message(body))


def may_send(region: str, pages: frozenset[int]) -> bool:
    """The last page is never leased to anybody."""
    return NUM_PAGES - 1 not in pages


if __name__ == "__main__":
    with contextlib.suppress(EOFError):
        serve(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]) if len(sys.argv) > 4 else -1)
    os._exit(0)
