"""The other processes of bench_vmm.py and bench_killed.py: one that imports and maps pages, one that also writes them
until it is killed, one that watches the GPU's free memory.

    python -m loadtest.vmm_children importer|writer|watcher|bare SOCKET_FD      started by vmm_link.py

Each answers commands on a socket pair, one JSON line each way; descriptors travel beside a command.
"""

import ctypes
import importlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from shared.errors import ClusterError
from shared.vmm.cuda_driver import CudaVmmDriver
from shared.vmm.cuda_pages import CudaWindow, ImportedCudaPages
from shared.vmm.errors import VmmError

FDS_PER_MESSAGE = 250  # the kernel takes 253
KERNEL_THREADS = 256  # a block of endless.cu: its __launch_bounds__
WRITTEN_WORDS = (0x11111111, 0x22222222)  # what copies on the GPU write in turn; the highest bit is clear
HOST_BYTE = 0x33
HOST_BYTES = 256 << 20  # at most, a copy from host memory


def num_fds() -> int:
    """Descriptors that this process has open."""
    return len(os.listdir("/proc/self/fd"))


def cuda_call(name: str, *arguments: Any) -> Any:
    """What a function of CUDA's driver gives, or None; for those that CudaVmmDriver has no method for.

    Raises: VmmError.
    """
    status, *values = getattr(importlib.import_module("cuda.bindings.driver"), name)(*arguments)
    if int(status) != 0:
        raise VmmError(f"{name}: {status.name}")
    return values[0] if values else None


class Importer:
    """Imports another process's pages and maps them all, as an engine's rank does when it links up."""

    def __init__(self) -> None:
        self.driver = CudaVmmDriver(0)
        self.import_s = 0.0
        self.most_fds = 0
        self.pages: ImportedCudaPages
        self.window: CudaWindow

    def begin(self, num_pages: int, page_bytes: int, _fds: list[int]) -> dict[str, Any]:
        """Address space for all of them."""
        self.pages = ImportedCudaPages(self.driver, num_pages, page_bytes)
        self.window = self.pages.window(num_pages)
        return {}

    def add(self, page: int, _count: int, fds: list[int]) -> dict[str, Any]:
        """The descriptors of the pages from `page` on."""
        self.most_fds = max(self.most_fds, num_fds())
        begin = time.perf_counter()
        self.pages.add(page, fds)
        self.import_s += time.perf_counter() - begin
        return {}

    def map(self, _a: int, _b: int, _fds: list[int]) -> dict[str, Any]:
        """All at once."""
        begin = time.perf_counter()
        self.window.map(0, 0, self.pages.num_pages)
        map_s = time.perf_counter() - begin
        return {"import_s": self.import_s, "map_s": map_s, "most_fds": self.most_fds, "fds": num_fds()}

    def drop(self, page: int, count: int, _fds: list[int]) -> dict[str, Any]:
        """Give some of them up: what a reclaim asks of a consumer."""
        self.window.unmap(page, count)
        self.pages.release(page, count)
        return {"at": time.monotonic()}


class Writer(Importer):
    """Writes all that it maps, from the answer to kernel() or copies() on, until it is killed."""

    def __init__(self) -> None:
        super().__init__()
        self.cuda: Any = importlib.import_module("cuda.bindings.driver")

    def kernel(self, num_blocks: int, num_bytes: int, fds: list[int]) -> dict[str, Any]:
        """One launch of endless.cu, of which the descriptor has so many bytes of machine code."""
        module = cuda_call("cuModuleLoadData", os.pread(fds[0], num_bytes, 0))
        function = cuda_call("cuModuleGetFunction", module, b"write_endlessly")
        at, count = ctypes.c_uint64(self.window.address), ctypes.c_uint64(self.window.size_bytes // 4)
        pointers = (ctypes.c_void_p * 2)(ctypes.addressof(at), ctypes.addressof(count))
        cuda_call(
            "cuLaunchKernel", function, num_blocks, 1, 1, KERNEL_THREADS, 1, 1, 0, 0, ctypes.addressof(pointers), 0
        )  # fmt: skip
        return {}

    def copies(self, _a: int, _b: int, _fds: list[int]) -> dict[str, Any]:
        """Whole copies from two places on the GPU in turn, and beside them pieces from host memory; the driver's
        queues of both are kept full.
        """
        target, size = self.window.address, self.window.size_bytes
        sources = [int(cuda_call("cuMemAlloc", size)) for _ in WRITTEN_WORDS]
        for source, word in zip(sources, WRITTEN_WORDS, strict=True):
            cuda_call("cuMemsetD32", source, word, size // 4)
        cuda_call("cuStreamSynchronize", 0)
        piece = min(size, HOST_BYTES)
        host = int(cuda_call("cuMemHostAlloc", piece, 0))
        ctypes.memset(host, HOST_BYTE, piece)
        pieces = range(0, size - piece + 1, piece)
        for name, copies in (
            ("cuMemcpyDtoDAsync", [(target, source, size) for source in sources]),
            ("cuMemcpyHtoDAsync", [(target + offset, host, piece) for offset in pieces]),
        ):
            stream = cuda_call("cuStreamCreate", self.cuda.CUstream_flags.CU_STREAM_NON_BLOCKING.value)
            threading.Thread(target=self._queue, args=(name, copies, stream), daemon=True).start()
        return {}

    def _queue(self, name: str, copies: Sequence[tuple[int, int, int]], stream: Any) -> None:
        self.driver.make_current()
        while True:  # the driver makes us wait when its queue is full
            for each in copies:
                cuda_call(name, *each, stream)


class Watcher:
    """Sees the GPU's memory as any other process does."""

    def __init__(self) -> None:
        self.driver = CudaVmmDriver(0)
        self.base = 0

    def mark(self, _a: int, _b: int, _fds: list[int]) -> dict[str, Any]:
        """What is free now."""
        self.base = self.driver.memory_info()[0]
        return {"free": self.base}

    def wait(self, more_bytes: int, timeout_ms: int, _fds: list[int]) -> dict[str, Any]:
        """Answers as soon as so much more is free, with the (system-wide) time of that."""
        deadline = time.monotonic() + timeout_ms / 1000
        while (free := self.driver.memory_info()[0]) < self.base + more_bytes:
            if time.monotonic() > deadline:
                return {"at": 0.0, "more": free - self.base}
        return {"at": time.monotonic(), "more": free - self.base}


class Bare:
    """Owns pages without any CUDA context: what a mempool would cost then."""

    def create(self, size_bytes: int, _b: int, _fds: list[int]) -> dict[str, Any]:
        """Whether cuMemCreate and the export work with nothing but cuInit."""
        driver = CudaVmmDriver(0, context=False)
        handle = driver.create(size_bytes)
        os.close(driver.export_fd(handle))
        return {"handle": handle > 0}


def main(argv: list[str]) -> int:
    """Serve until the other end closes."""
    kind, fd = argv[0], int(argv[1])
    link = socket.socket(fileno=fd)
    child: Any = None
    while True:
        data, fds, _, _ = socket.recv_fds(link, 4096, FDS_PER_MESSAGE)
        if not data:
            return 0
        name, a, b = json.loads(data)
        try:
            if child is None:
                child = {"importer": Importer, "writer": Writer, "watcher": Watcher, "bare": Bare}[kind]()
            answer = getattr(child, name)(a, b, list(fds))
        except ClusterError as error:
            answer = {"error": error.message}
        link.sendall(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
