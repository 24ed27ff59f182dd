"""libnccl's few calls between two processes without GPUs: a group's bytes go over a socket, on a thread of its own.

What is like NCCL: groups meet in the order of the calls, nothing ends before the other end has posted, a communicator
cannot forget an operation, and events pass behind the receives. Memory is ordinary memory.
"""

import contextlib
import itertools
import os
import queue
import socket
import threading
import time

from shared.kernels.copy_pages.host_memory import view
from shared.transfer.errors import TransferFailed
from shared.transfer.nccl_library import ID_BYTES

Buffers = list[tuple[int, int]]


class Comm:
    """One direction of a pair, at one end. Operations run one after the other; after abort() none does."""

    def __init__(self, unique_id: bytes, rank: int) -> None:
        self._name = "\0quire-nccl-" + unique_id[:32].hex()
        self._rank = rank
        self._sock: socket.socket | None = None
        self._work: queue.SimpleQueue[tuple[str, Buffers, threading.Event]] = queue.SimpleQueue()
        self._ended = threading.Event()
        self.broken = ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def joined(self) -> bool:
        """Whether both ends are there."""
        return self._sock is not None

    def post(self, what: str, buffers: Buffers) -> threading.Event:
        """Set when its bytes are there, or nothing touches them any more."""
        over = threading.Event()
        self._work.put((what, buffers, over))
        return over

    def abort(self) -> None:
        """Wait until nothing of it runs."""
        self._ended.set()
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(30)

    def _meet(self) -> socket.socket:
        end = socket.socket(socket.AF_UNIX)
        end.settimeout(0.05)
        if self._rank == 0:
            end.bind(self._name)
            end.listen(1)
        while not self._ended.is_set():
            with contextlib.suppress(OSError):
                if self._rank == 0:
                    found, _ = end.accept()
                    end.close()
                    found.settimeout(None)
                    return found
                end.connect(self._name)
                end.settimeout(None)
                return end
            time.sleep(0.005)
        end.close()
        raise OSError("ended")

    def _run(self) -> None:
        pending: list[threading.Event] = []
        try:
            self._sock = self._meet()
            while not self._ended.is_set():
                with contextlib.suppress(queue.Empty):
                    what, buffers, over = self._work.get(timeout=0.01)
                    pending.append(over)
                    for address, num_bytes in buffers:
                        self._move(what, address, num_bytes)
                    over.set()
        except OSError as error:
            self.broken = str(error) or "broken"
            self._ended.wait()  # the operation stands on its stream until it is aborted
        finally:
            if self._sock is not None:
                self._sock.close()
            while not self._work.empty():
                pending.append(self._work.get()[2])
            for over in pending:
                over.set()

    def _move(self, what: str, address: int, num_bytes: int) -> None:
        assert self._sock is not None
        left = memoryview(view(address, num_bytes))
        while len(left):
            count = self._sock.send(left) if what == "send" else self._sock.recv_into(left)
            if not count:
                raise OSError("the other end is gone")
            left = left[count:]


class SocketNccl:
    """nccl_library.NcclLibrary, and of copy_pages.driver.CopyDriver what the path needs of it."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._comms: dict[int, Comm] = {}
        self._on_stream: dict[int, list[threading.Event]] = {}
        self._before: dict[int, list[threading.Event]] = {}

    def unique_id(self) -> bytes:
        return os.urandom(ID_BYTES)

    def open(self, unique_id: bytes, rank: int) -> int:
        number = next(self._numbers)
        self._comms[number] = Comm(unique_id, rank)
        return number

    def ready(self, comm: int) -> bool:
        found = self._comms.get(comm)
        if found is None or found.broken:
            raise TransferFailed(found.broken if found is not None else "the pair has been ended")
        return found.joined

    def send(self, comm: int, buffers: Buffers, stream: int) -> None:
        self._on_stream[stream].append(self._comms[comm].post("send", buffers))

    def receive(self, comm: int, buffers: Buffers, stream: int) -> None:
        self._on_stream[stream].append(self._comms[comm].post("receive", buffers))

    def abort(self, comm: int) -> None:
        if (found := self._comms.pop(comm, None)) is not None:
            found.abort()

    def make_current(self) -> None: ...

    def create_stream(self) -> int:
        number = next(self._numbers)
        self._on_stream[number] = []
        return number

    def create_event(self) -> int:
        return next(self._numbers)

    def record(self, event: int, stream: int) -> None:
        self._before[event] = [over for over in self._on_stream[stream] if not over.is_set()]

    def passed(self, event: int) -> bool:
        return all(over.is_set() for over in self._before.get(event, ()))
