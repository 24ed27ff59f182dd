"""The other end of a process of vmm_children.py, and lending it pages by their descriptors."""

import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

from loadtest.processes import DIE_WITH_PARENT
from loadtest.registry import ROOT
from loadtest.vmm_children import FDS_PER_MESSAGE
from shared.errors import ClusterError
from shared.vmm.cuda_pages import CudaPages

LINK_S = 120
END_S = 30


class Child:
    """One process of vmm_children.py.

    Args: dies_with_us: the kernel kills it when this process ends, however it ends.
    """

    def __init__(self, kind: str, *, dies_with_us: bool = False) -> None:
        self._link, theirs = socket.socketpair()
        self._link.settimeout(LINK_S)
        command = [sys.executable, "-m", "loadtest.vmm_children", kind, str(theirs.fileno())]
        if dies_with_us:
            command = [sys.executable, "-I", "-S", str(DIE_WITH_PARENT), str(os.getpid()), *command]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=ROOT)
        theirs.close()

    @property
    def pid(self) -> int:
        """Its number, which is nobody else's before close() or kill()."""
        return self._process.pid

    def send(self, name: str, a: int = 0, b: int = 0, fds: list[int] | None = None) -> None:
        """A command, not waited for."""
        socket.send_fds(self._link, [json.dumps([name, a, b]).encode()], fds or [])

    def answer(self) -> dict[str, Any]:
        """To the oldest command. Raises: ClusterError when the child met one."""
        data = b""
        while not data.endswith(b"\n"):
            piece = self._link.recv(4096)
            if not piece:
                raise ClusterError("the child process ended")
            data += piece
        found = json.loads(data)
        if "error" in found:
            raise ClusterError(found["error"])
        return found

    def call(self, name: str, a: int = 0, b: int = 0, fds: list[int] | None = None) -> dict[str, Any]:
        """send() and answer()."""
        self.send(name, a, b, fds)
        return self.answer()

    def close(self) -> None:
        """The child ends with its socket."""
        self._link.close()
        self._process.wait(END_S)

    def kill(self) -> None:
        """It ends whatever it does; also when it is dead. Raises: TimeoutExpired."""
        self._link.close()
        self._process.kill()
        self._process.wait(END_S)


def lend(importer: Child, pages: CudaPages) -> tuple[float, dict[str, Any]]:
    """It imports and maps all of them: (seconds of export, what it says). Raises: ClusterError."""
    importer.call("begin", pages.num_pages, pages.page_bytes)
    export_s = 0.0
    for first in range(0, pages.num_pages, FDS_PER_MESSAGE):
        begin = time.perf_counter()
        last = min(first + FDS_PER_MESSAGE, pages.num_pages)
        fds = [pages.export_fd(page) for page in range(first, last)]
        export_s += time.perf_counter() - begin
        importer.send("add", first, len(fds), fds)
        for fd in fds:
            os.close(fd)
        importer.answer()
    return export_s, importer.call("map")
