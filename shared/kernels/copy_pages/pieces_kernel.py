"""pieces.cu on one GPU: compiled and loaded once, launched on plain integers."""

import ctypes
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from shared.kernels.copy_pages.copies import CopyFailed, CopyUnavailable
from shared.kernels.copy_pages.plan import KERNEL_CTA_WARPS
from shared.kernels.nvrtc import Binary, CompilerUnavailable, SourceRefused, compile_source

SOURCE = Path(__file__).with_name("pieces.cu")
NAME = b"copy_pieces"
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
        self._cuda = cuda
        try:
            kind = cuda.CUdevice_attribute
            if not self._attribute(kind.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, device):
                raise CopyUnavailable("page-locked memory has another address on this GPU")
            major = self._attribute(kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
            minor = self._attribute(kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
            self._module = self._call("cuModuleLoadData", compiled(f"sm_{major}{minor}").cubin)
            self._function = self._call("cuModuleGetFunction", self._module, NAME)
            self._call("cuFuncLoad", self._function)
        except (CopyFailed, CompilerUnavailable, SourceRefused) as error:
            raise CopyUnavailable(error.message) from error
        except RuntimeError as error:  # a driver without one of these calls
            raise CopyUnavailable(str(error).splitlines()[0]) from error

    def _call(self, name: str, *args: Any) -> Any:
        status, *values = getattr(self._cuda, name)(*args)
        if int(status) != 0:
            raise CopyFailed(name, getattr(status, "name", str(status)))
        return values[0] if values else None

    def _attribute(self, which: Any, device: Any) -> int:
        return int(self._call("cuDeviceGetAttribute", which, device))

    def launch(self, table: int, rows: int, ctas: int, stream: int) -> None:
        """See driver.CopyDriver.copy_rows. Raises: CopyFailed. Cost: 5 us."""
        at, count = ctypes.c_uint64(table), ctypes.c_uint32(rows)
        pointers = (ctypes.c_void_p * 2)(ctypes.addressof(at), ctypes.addressof(count))
        self._call(
            "cuLaunchKernel", self._function, ctas, 1, 1, THREADS, 1, 1, 0, stream, ctypes.addressof(pointers), 0
        )  # fmt: skip

    def close(self) -> None:
        """Nothing of it runs any more."""
        self._call("cuModuleUnload", self._module)
