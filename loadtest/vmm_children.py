"""The other processes of bench_vmm.py: one that imports and maps pages, one that watches the GPU's free memory.

    python -m loadtest.vmm_children importer|watcher|bare SOCKET_FD [...]      started by bench_vmm.py

Each answers commands on a socket pair, one JSON line each way; descriptors travel beside a command.
"""

import json
import os
import socket
import sys
import time
from typing import Any

from shared.errors import ClusterError
from shared.vmm.cuda_driver import CudaVmmDriver
from shared.vmm.cuda_pages import CudaWindow, ImportedCudaPages

FDS_PER_MESSAGE = 250  # the kernel takes 253


def num_fds() -> int:
    """Descriptors that this process has open."""
    return len(os.listdir("/proc/self/fd"))


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
                child = {"importer": Importer, "watcher": Watcher, "bare": Bare}[kind]()
            answer = getattr(child, name)(a, b, list(fds))
        except ClusterError as error:
            answer = {"error": error.message}
        link.sendall(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
