"""What bench_transfer.py measures with: a second process on the second GPU, pages that both map, a clock.

The owner process serves orders (frames over a socket pair, descriptors with them); the puller measures. Nothing here
imports torch. NVLink multicast stays off.
"""

import array
import importlib
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from services.mempool.slabs import DeviceSlabs
from shared.errors import PeerGone
from shared.kernels.copy_pages.driver import CudaDriver
from shared.transfer.cuda_window import CudaWindow, load_driver
from shared.transfer.interface import Region, RegionKind

MIB = 1 << 20
NUM = 64  # pages of one transfer
SETS = (2 * MIB, 8 * MIB)
EPOCH = 7
FDS_PER_FRAME = 200  # the kernel takes 253
HEAD = struct.Struct("<I")
QUIET = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "NIXL_LOG_LEVEL": "WARN",
    "UCX_MEM_EVENTS": "y",  # as NIXL comes, which is beside us here; Quire's own processes: shared/transfer/config.py
}


class Wire:
    """Frames of (kind, body) with descriptors, over one socket. A reader thread sorts them by kind."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._queues: dict[str, queue.Queue[tuple[Any, list[int]]]] = {}
        self._guard = threading.Lock()
        self.on_message: Callable[[bytes], None] = lambda body: None  # NIXL's control messages
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, kind: str, body: Any = None, fds: list[int] | None = None) -> None:
        """Raises: PeerGone."""
        raw = msgspec.msgpack.encode((kind, body))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            with self._lock:
                self._sock.sendmsg([HEAD.pack(len(raw))], rights)
                self._sock.sendall(raw)
        except OSError as error:
            raise PeerGone(str(error)) from error

    def receive(self, kind: str, timeout_s: float = 60.0) -> tuple[Any, list[int]]:
        """The next frame of that kind. Raises: queue.Empty."""
        return self._queue(kind).get(timeout=timeout_s)

    def _queue(self, kind: str) -> "queue.Queue[tuple[Any, list[int]]]":
        with self._guard:
            return self._queues.setdefault(kind, queue.Queue())

    def _read(self) -> None:
        while True:
            fds = array.array("i")
            try:
                space = socket.CMSG_SPACE(FDS_PER_FRAME * fds.itemsize)
                head, rights, _, _ = self._sock.recvmsg(HEAD.size, space, socket.MSG_WAITALL)
            except OSError:
                return
            if len(head) < HEAD.size:
                self._queue("order").put((["end"], []))
                return
            for _, _, data in rights:
                fds.frombytes(data)
            body = bytearray()
            (length,) = HEAD.unpack(head)
            while len(body) < length:
                body += self._sock.recv(length - len(body))
            kind, value = msgspec.msgpack.decode(bytes(body))
            if kind == "transfer":
                self.on_message(value)
            else:
                self._queue(kind).put((value, list(fds)))


class ChannelOverWire:
    """shared.transfer.interface.Channel."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def send(self, message: bytes) -> None:
        """See interface.Channel."""
        self._wire.send("transfer", message)


class Gpu:
    """One GPU's primary context, its pages and slabs."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.copy = CudaDriver(ordinal)
        self.driver = load_driver()
        self.copy.make_current()
        device = self.call("cuDeviceGet", ordinal)
        self.uuid = bytes(self.call("cuDeviceGetUuid", device).bytes).hex()
        self._slabs: list[int] = []

    def call(self, name: str, *arguments: Any) -> Any:
        """A driver call that has to succeed."""
        status, *results = getattr(self.driver, name)(*arguments)
        if int(status) != 0:
            raise RuntimeError(f"{name}: {status.name}")
        return results[0] if results else None

    def pages(self, num_handles: int, handle_bytes: int) -> "OwnPages":
        """Exportable memory, mapped here side by side."""
        return OwnPages(self, num_handles, handle_bytes)

    def slab(self, num_bytes: int) -> int:
        """cudaMalloc memory; freed by close()."""
        address = self.copy.allocate_device(num_bytes)
        self._slabs.append(address)
        return address

    def free_slabs(self) -> None:
        """Everything of slab()."""
        for address in self._slabs:
            self.copy.free_device(address)
        self._slabs = []

    def mark(self, address: int, num_bytes: int, value: int) -> None:
        """Fill with 32-bit words."""
        self.call("cuMemsetD32", address, value & 0xFFFFFFFF, num_bytes // 4)
        self.call("cuCtxSynchronize")

    def word(self, address: int) -> int:
        """The 32-bit word there."""
        word = np.zeros(1, np.uint32)
        self.call("cuMemcpyDtoH", word.ctypes.data, address, 4)
        return int(word[0])


class OwnPages:
    """Handles of one GPU, mapped writable in the process that owns them."""

    def __init__(self, gpu: Gpu, num_handles: int, handle_bytes: int) -> None:
        begun_s = time.perf_counter()
        self.num_handles = num_handles
        self.handle_bytes = handle_bytes
        self._slabs = DeviceSlabs(f"cuda:{gpu.uuid}", num_handles, handle_bytes)
        gpu.copy.make_current()
        self.window = CudaWindow(gpu.driver, gpu.ordinal, num_handles, handle_bytes, writable=True)
        for first in range(0, num_handles, FDS_PER_FRAME):
            self.window.add(self.export(first))
        self.made_s = time.perf_counter() - begun_s

    @property
    def address(self) -> int:
        """Of the first page."""
        return self.window.address

    def export(self, first: int) -> list[int]:
        """Descriptors of the next FDS_PER_FRAME handles; the caller closes them."""
        return [self._slabs.export(n) for n in range(first, min(first + FDS_PER_FRAME, self.num_handles))]

    def close(self) -> None:
        """Unmap and release."""
        self.window.close()
        self._slabs.close()


def region(name: str, kind: RegionKind, address: int, page_bytes: int, num_pages: int, gpu: Gpu) -> Region:
    """A region of this GPU."""
    return Region(
        name=name,
        kind=kind,
        address=address,
        page_bytes=page_bytes,
        num_pages=num_pages,
        memory_key=f"{name}@{os.getpid()}.{gpu.ordinal}",
        device=gpu.ordinal,
        device_uuid=gpu.uuid,
    )


def count_fds() -> int:
    """Open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def scattered(num: int, total: int, seed: int) -> list[int]:
    """`num` different numbers below `total`, no two of them in order."""
    return np.random.default_rng(seed).permutation(total)[:num].tolist()


def timed(action: Callable[[], Any], repeats: int, warm_up: int = 2) -> list[float]:
    """Wall times in us."""
    for _ in range(warm_up):
        action()
    found = []
    for _ in range(repeats):
        begun = time.perf_counter()
        action()
        found.append((time.perf_counter() - begun) * 1e6)
    return found


def start_owner(module: str, root: Path) -> tuple[subprocess.Popen[bytes], Wire]:
    """`python -m module FD` with one end of a socket pair."""
    ours, theirs = socket.socketpair()
    env = {**os.environ, **QUIET}  # noqa: TID251
    process = subprocess.Popen(
        [sys.executable, "-m", module, str(theirs.fileno())],
        cwd=root,
        pass_fds=[theirs.fileno()],
        env=env,
    )
    theirs.close()
    return process, Wire(ours)


def descriptors(wire: Wire) -> Iterator[list[int]]:
    """The batches that the owner sends after an "export" order."""
    while True:
        more, fds = wire.receive("fds")
        if fds:
            yield fds
        wire.send("more")
        if not more:
            return


def more_descriptors(wire: Wire) -> None:
    """The owner waits here, so that one batch of descriptors is open at a time."""
    wire.receive("more")


def torch_pair(rank: int, port: int) -> Any:
    """torch.distributed with NCCL over both processes; torch itself. Raises: ImportError."""
    torch = importlib.import_module("torch")
    distributed = importlib.import_module("torch.distributed")
    torch.cuda.set_device(rank)
    distributed.init_process_group(
        "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        device_id=torch.device(f"cuda:{rank}"),
    )
    return torch


def nccl_round(torch: Any, buffer: Any, piece_bytes: int, num: int, rank: int, *, grouped: bool) -> None:
    """Rank 1 sends `num` pieces, rank 0 receives them: in one group, or one call each."""
    dist = torch.distributed
    pieces = [buffer[n * piece_bytes : (n + 1) * piece_bytes] for n in range(num)]
    if grouped:
        kind = dist.isend if rank else dist.irecv
        for work in dist.batch_isend_irecv([dist.P2POp(kind, piece, 1 - rank) for piece in pieces]):
            work.wait()
    else:
        for piece in pieces:
            if rank:
                dist.send(piece, 0)
            else:
                dist.recv(piece, 1)
    torch.cuda.synchronize()
