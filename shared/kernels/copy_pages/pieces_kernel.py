"""pieces.cu on one GPU: compiled and loaded once, launched on plain integers."""

import ctypes
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from shared.kernels.copy_pages.copies import CopyUnavailable
from shared.kernels.copy_pages.loaded_kernel import LoadedKernel
from shared.kernels.copy_pages.plan import KERNEL_CTA_WARPS
from shared.kernels.nvrtc import Binary, compile_source

SOURCE = Path(__file__).with_name("pieces.cu")
NAME = "copy_pieces"
THREADS = 32 * KERNEL_CTA_WARPS  # its __launch_bounds__


@cache
def compiled(arch: str) -> Binary:
    """Needs no GPU. Raises: CompilerUnavailable, SourceRefused. Cost: 0.3 s, once a process."""
    return compile_source(SOURCE, arch)


@cache
def digest() -> str:
    """Of the source: costs of another kernel are not this one's. 8 hex digits."""
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:8]


class PiecesKernel:
    """Of the current context. Raises: CopyUnavailable where it cannot be compiled, or not read this host's memory."""

    def __init__(self, cuda: Any, device: Any) -> None:
        self._kernel = LoadedKernel(cuda, device, NAME, THREADS, compiled)
        which = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        if not self._kernel.attribute(which):
            self._kernel.close()
            raise CopyUnavailable("page-locked memory has another address on this GPU")

    def launch(self, table: int, rows: int, ctas: int, stream: int) -> None:
        """See driver.CopyDriver.copy_rows. Raises: CopyFailed. Cost: 5 us."""
        at, count = ctypes.c_uint64(table), ctypes.c_uint32(rows)
        pointers = (ctypes.c_void_p * 2)(ctypes.addressof(at), ctypes.addressof(count))
        self._kernel.launch(ctas, stream, ctypes.addressof(pointers))

    def close(self) -> None:
        """Nothing of it runs any more."""
        self._kernel.close()
