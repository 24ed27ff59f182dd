"""For bench_killed.py: the lender, who looks at the words of its pages; processes stopped and killed through a pidfd,
as the mempool kills one.
"""

import importlib
import os
import select
import signal
import time
from typing import Any

import numpy as np

from loadtest.registry import ROOT
from loadtest.vmm_children import KERNEL_THREADS, cuda_call
from loadtest.vmm_link import Child
from shared.kernels.nvrtc import compile_source
from shared.vmm.cuda_driver import CudaVmmDriver
from shared.vmm.cuda_pages import CudaPages

GIB, PAGE_BYTES = 1 << 30, 8 << 20
SOURCE = ROOT / "loadtest" / "endless.cu"
OWN_WORD = 0xA5000000  # and the fill's number; a writer's words have the highest bit clear
CHUNK_BYTES = 256 << 20  # read back at a time
SPOTS, SPOT_BYTES = 4, 4096  # what look() reads
THREADS_OF_SM = 2048
DEAD_S, STOPPED_S = 60.0, 5.0


class Lender:
    """Owns pages and maps them all, in this process's own context.

    Raises: OutOfPages, VmmError.
    """

    def __init__(self, driver: CudaVmmDriver, gib: int) -> None:
        self._driver = driver
        self._cuda: Any = importlib.import_module("cuda.bindings.driver")
        self.pages = CudaPages(driver, gib * GIB // PAGE_BYTES, PAGE_BYTES)
        self._window = self.pages.window(self.pages.num_pages)
        self._window.map(0, 0, self.pages.num_pages)
        self.size_bytes = self._window.size_bytes
        self._chunk = np.zeros(
            min(CHUNK_BYTES, self.size_bytes) // 4, np.uint32
        )  # touched, so that reads are fast
        self._spot = np.zeros(SPOT_BYTES // 4, np.uint32)
        self._word = OWN_WORD
        self._code = b""

    def free_bytes(self) -> int:
        """Of the GPU, as everybody sees it."""
        return self._driver.memory_info()[0]

    def begin(self, writer: Child, kind: str) -> None:
        """It writes: "kernel" or "copies". Raises: ClusterError."""
        if kind != "kernel":
            writer.call(kind)
            return
        which = self._cuda.CUdevice_attribute
        device = cuda_call("cuDeviceGet", 0)
        if not self._code:
            major = cuda_call(
                "cuDeviceGetAttribute", which.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device
            )
            minor = cuda_call(
                "cuDeviceGetAttribute", which.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device
            )
            self._code = compile_source(SOURCE, f"sm_{major}{minor}").cubin
        sms = cuda_call("cuDeviceGetAttribute", which.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device)
        fd = os.memfd_create("endless")
        try:
            os.write(fd, self._code)
            writer.call("kernel", int(sms) * THREADS_OF_SM // KERNEL_THREADS, len(self._code), [fd])
        finally:
            os.close(fd)

    def fill(self) -> None:
        """All words are the next one of our own when this returns."""
        self._word += 1
        cuda_call("cuMemsetD32", self._window.address, self._word, self.size_bytes // 4)
        cuda_call("cuStreamSynchronize", 0)

    def strange_words(self) -> tuple[int, list[list[int]]]:
        """How many words are not those of the last fill(); [index, word] of the first one in each chunk."""
        count, first = 0, []
        for offset in range(0, self.size_bytes, self._chunk.nbytes):
            words = self._chunk[: (self.size_bytes - offset) // 4]
            cuda_call("cuMemcpyDtoH", words.ctypes.data, self._window.address + offset, words.nbytes)
            wrong = words != self._word
            if found := int(np.count_nonzero(wrong)):
                at = int(np.argmax(wrong))
                first.append([offset // 4 + at, int(words[at])])
                count += found
        return count, first

    def overwritten_words(self, wait_s: float, patience_s: float) -> int:
        """Strange words `wait_s` behind a fill; tried again for `patience_s` while there are none."""
        end_s = time.monotonic() + patience_s
        while True:
            self.fill()
            time.sleep(wait_s)
            count, _ = self.strange_words()
            if count or time.monotonic() > end_s:
                return count

    def changes(self, during_s: float) -> bool:
        """Whether some words changed while we looked, which takes so long whatever is found."""
        end_s = time.monotonic() + during_s
        first, found = self._look(), False
        while time.monotonic() < end_s:
            time.sleep(0.002)
            found = found or self._look() != first
        return found

    def _look(self) -> bytes:
        seen = b""
        for offset in range(0, self.size_bytes, self.size_bytes // SPOTS):
            cuda_call("cuMemcpyDtoH", self._spot.ctypes.data, self._window.address + offset, SPOT_BYTES)
            seen += self._spot.tobytes()
        return seen

    def close(self) -> None:
        """The pages go; whoever else maps them is dead."""
        self._window.close()
        self.pages.close()


def stop(pidfd: int) -> None:
    """A child of ours stands still when this returns. Raises: RuntimeError when it does not; OSError."""
    signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
    end_s = time.monotonic() + STOPPED_S
    while os.waitid(os.P_PIDFD, pidfd, os.WSTOPPED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > end_s:
            raise RuntimeError(f"the writer did not stop within {STOPPED_S:.0f} s")
        time.sleep(0.001)


def kill(pidfd: int) -> tuple[float, float]:
    """(moment of the signal, moment at which the pidfd was readable), monotonic s. Raises: RuntimeError; OSError."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    begin_s = time.monotonic()
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    if not poll.poll(DEAD_S * 1e3):
        raise RuntimeError(f"a killed process was not dead after {DEAD_S:.0f} s")
    return begin_s, time.monotonic()


def ms(seconds: float) -> float:
    """To the microsecond."""
    return round(seconds * 1e3, 3)
