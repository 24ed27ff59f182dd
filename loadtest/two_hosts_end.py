"""One end of a transfer between two_hosts.py's namespaces: `server` holds pages, `puller` pulls them as told on stdin.

    python -m loadtest.two_hosts_end puller|server FD DEVICE PAGE_BYTES NUM_PAGES

Each order is a line of JSON, and so is each answer. Page p holds words of (p, seed) that its reader can compute.
"""

import contextlib
import json
import mmap
import socket
import struct
import sys
import threading
import time
from typing import Any

import numpy as np

from shared.errors import PeerGone
from shared.transfer.config import TransferSettings, apply_ucx_environment
from shared.transfer.errors import TransferError, TransferRefused
from shared.transfer.interface import Peer, Region, RegionKind
from shared.transfer.nixl import NixlTransport
from shared.transfer.nixl_agent import NixlAgent

HEAD = struct.Struct("<cI")
RAW_TIMEOUT_S = 30.0


class Control:
    """Frames of [kind][length][body]; an interface.Channel."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()

    def send(self, message: bytes) -> None:
        """See interface.Channel."""
        self.frame(b"M", message)

    def frame(self, kind: bytes, body: bytes = b"") -> None:
        """Raises: PeerGone."""
        try:
            with self._lock:
                self._sock.sendall(HEAD.pack(kind, len(body)) + body)
        except OSError as error:
            raise PeerGone(str(error)) from error

    def receive(self) -> tuple[bytes, bytes]:
        """Raises: EOFError."""
        kind, length = HEAD.unpack(self._exactly(HEAD.size))
        return kind, self._exactly(length)

    def _exactly(self, length: int) -> bytes:
        body = bytearray()
        while len(body) < length:
            part = self._sock.recv(min(1 << 20, length - len(body)))
            if not part:
                raise EOFError
            body += part
        return bytes(body)


class End:
    """Memory, transport, link, and an agent of its own for raw transfers."""

    def __init__(self, role: str, control: Control, page_bytes: int, num_pages: int) -> None:
        self.control = control
        self.page_bytes = page_bytes
        self.num_pages = num_pages
        self.memory = mmap.mmap(-1, page_bytes * num_pages)
        self.words = np.frombuffer(self.memory, np.uint64).reshape(num_pages, page_bytes // 8)
        self.address = int(self.words.ctypes.data)
        self.settled: list[int] = []
        self.transport = NixlTransport(role, mode="write")
        self.transport.register(
            Region(f"{role}-pages", RegionKind.HOST, self.address, page_bytes, num_pages, role)
        )
        self.raw = NixlAgent(f"{role}-raw")
        self.raw.register(self.address, page_bytes * num_pages, -1)
        self.control.frame(b"D", self.transport.describe())
        self.control.frame(b"A", self.address.to_bytes(8, "little") + self.raw.metadata())
        _, description = control.receive()
        _, raw = control.receive()
        self.link = self.transport.connect(
            Peer(description, channel=control, on_settled=lambda region, pages: self.settled.extend(pages))
        )
        self.raw_address = int.from_bytes(raw[:8], "little")
        self.raw_peer = self.raw.add_peer(raw[8:])

    def fill(self, seed: int) -> None:
        """The pattern: every word of a page says which page it is."""
        self.words[:] = pattern(np.arange(self.num_pages, dtype=np.uint64), seed)[:, None]


def pattern(pages: np.ndarray, seed: int) -> np.ndarray:
    """uint64 [num_pages]: the word that fills each page."""
    return pages * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)


def serve(end: End) -> None:
    """Until the puller ends. "R": write these pages to the peer with NIXL alone, and say how long it took."""
    end.fill(1)
    while True:
        kind, body = end.control.receive()
        if kind == b"M":
            end.link.on_message(body)
        elif kind == b"R":
            nap_us = int.from_bytes(body[:4], "little")
            pages = np.frombuffer(body[4:], np.uint64).reshape(2, -1) * np.uint64(end.page_bytes)
            sizes = np.full(pages.shape[1], end.page_bytes, np.uint64)
            begun_s = time.perf_counter()
            transfer = end.raw.begin(
                write=True,
                local=pages[0] + np.uint64(end.address),
                local_device=-1,
                remote=pages[1] + np.uint64(end.raw_address),
                remote_device=-1,
                sizes=sizes,
                peer=end.raw_peer,
            )
            while not transfer.poll():
                if time.perf_counter() - begun_s > RAW_TIMEOUT_S:
                    break
                if nap_us:
                    time.sleep(nap_us / 1e6)
            end.control.frame(b"R", struct.pack("<d", time.perf_counter() - begun_s))


class Puller:
    """Orders to answers."""

    def __init__(self, end: End) -> None:
        self.end = end
        self._raw_done = threading.Event()
        self._raw_s = 0.0
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                kind, body = self.end.control.receive()
                if kind == b"M":
                    self.end.link.on_message(body)
                else:
                    (self._raw_s,) = struct.unpack("<d", body)
                    self._raw_done.set()
        self.end.link.peer_dead()  # the socket pair ends with the process: proof enough

    def pull(self, source: list[int], target: list[int], timeout_ms: int = 20_000) -> dict[str, Any]:
        """One transfer; whether every word is right."""
        self.end.words[target] = 0
        begun_s = time.perf_counter()
        try:
            future = self.end.link.pull("server-pages", source, "puller-pages", target, timeout_ms=timeout_ms)
            moved = future.result()
        except TransferRefused as error:
            return {"error": error.code, "seconds": time.perf_counter() - begun_s}
        except TransferError as error:
            held = list(error.quarantined)
            return {"error": error.code, "quarantined": held, "seconds": time.perf_counter() - begun_s}
        seconds = time.perf_counter() - begun_s
        right = bool((self.end.words[target] == pattern(np.asarray(source, np.uint64), 1)[:, None]).all())
        return {"bytes": moved.num_bytes, "seconds": seconds, "right": right}

    def raw(self, source: list[int], target: list[int], nap_us: int = 0) -> dict[str, Any]:
        """The same pages by NIXL alone: the server writes, this side only calls progress, with naps or without
        (on few cores naps leave time for the kernel's network work)."""
        self.end.words[target] = 0
        self._raw_done.clear()
        self.end.control.frame(
            b"R", nap_us.to_bytes(4, "little") + np.asarray([source, target], np.uint64).tobytes()
        )
        while not self._raw_done.is_set():
            self.end.raw.progress()
            if nap_us:
                time.sleep(nap_us / 1e6)
        right = bool((self.end.words[target] == pattern(np.asarray(source, np.uint64), 1)[:, None]).all())
        return {"bytes": len(source) * self.end.page_bytes, "seconds": self._raw_s, "right": right}

    def state(self) -> dict[str, Any]:
        """What is quarantined, what has settled."""
        held = sorted(page for pages in self.end.link.quarantined().values() for page in pages)
        return {"quarantined": held, "settled": sorted(self.end.settled)}

    def serve_orders(self) -> None:
        """Until stdin ends."""
        for line in sys.stdin:
            arguments = json.loads(line)
            answer = getattr(self, arguments.pop("order"))(**arguments)
            print(json.dumps(answer), flush=True)


def main(argv: list[str]) -> None:
    """See the module."""
    role, fd, device, page_bytes, num_pages = argv
    apply_ucx_environment(TransferSettings(ucx_net_devices=device, ucx_tls="tcp"))
    end = End(role, Control(socket.socket(fileno=int(fd))), int(page_bytes), int(num_pages))
    print(json.dumps({"ready": role}), flush=True)
    if role == "server":
        with contextlib.suppress(EOFError):
            serve(end)
    else:
        Puller(end).serve_orders()


if __name__ == "__main__":
    main(sys.argv[1:])
