"""pages.cu on one GPU: whole pages, launched on plain integers."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from shared.kernels.copy_pages.copies import U64
from shared.kernels.copy_pages.loaded_kernel import LoadedKernel
from shared.kernels.nvrtc import Binary, compile_source

SOURCE = Path(__file__).with_name("pages.cu")
NAME = "copy_pages"
THREADS, MOST_PAGES = 512, 240  # its kThreads and kMostPages


@cache
def compiled(arch: str) -> Binary:
    """Needs no GPU. Raises: CompilerUnavailable, SourceRefused. Cost: 0.3 s, once a process."""
    return compile_source(SOURCE, arch)


class PagesKernel:
    """Of the current context; one thread at a time. Raises: CopyUnavailable where it cannot be compiled."""

    def __init__(self, cuda: Any, device: Any) -> None:
        self._kernel = LoadedKernel(cuda, device, NAME, THREADS, compiled)
        self._addresses = np.zeros(2 * MOST_PAGES, np.uint64)  # its Addresses
        self._size, self._count = ctypes.c_uint64(), ctypes.c_uint32()
        places = (
            int(self._addresses.ctypes.data),
            ctypes.addressof(self._size),
            ctypes.addressof(self._count),
        )
        self._pointers = (ctypes.c_void_p * 3)(*places)
        self._at_pointers = ctypes.addressof(self._pointers)

    def launch(self, sources: U64, targets: U64, page_bytes: int, ctas: int, stream: int) -> None:
        """See driver.CopyDriver.copy_whole. Raises: CopyFailed; parts may run then. Cost: 7 us for 240 pages each."""
        self._size.value = page_bytes
        for first in range(0, sources.size, MOST_PAGES):
            count = min(MOST_PAGES, sources.size - first)
            self._addresses[:count] = sources[first : first + count]
            self._addresses[MOST_PAGES : MOST_PAGES + count] = targets[first : first + count]
            self._count.value = count
            self._kernel.launch(ctas, stream, self._at_pointers)

    def close(self) -> None:
        """Nothing of it runs any more."""
        self._kernel.close()
