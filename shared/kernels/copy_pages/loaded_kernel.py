"""A kernel of one source file, compiled at run time and loaded into the current context."""

from collections.abc import Callable
from typing import Any

from shared.kernels.copy_pages.copies import CopyFailed, CopyUnavailable
from shared.kernels.nvrtc import Binary, CompilerUnavailable, SourceRefused


class LoadedKernel:
    """Raises: CopyUnavailable where it cannot be compiled or loaded.

    Args:
        compiled: by architecture, as "sm_90"; see nvrtc.compile_source.
        threads: of a block.
    """

    def __init__(
        self, cuda: Any, device: Any, name: str, threads: int, compiled: Callable[[str], Binary]
    ) -> None:
        self._cuda, self._device, self._threads = cuda, device, threads
        try:
            kind = cuda.CUdevice_attribute
            major = self.attribute(kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
            minor = self.attribute(kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
            self._module = self._call("cuModuleLoadData", compiled(f"sm_{major}{minor}").cubin)
            self._function = self._call("cuModuleGetFunction", self._module, name.encode())
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

    def attribute(self, which: Any) -> int:
        """Of the device. Raises: CopyFailed."""
        return int(self._call("cuDeviceGetAttribute", which, self._device))

    def launch(self, ctas: int, stream: int, pointers: int) -> None:
        """`pointers`: address of an array with the address of each argument, which may change when this returns.

        Raises: CopyFailed. Cost: 5 us.
        """
        self._call(
            "cuLaunchKernel", self._function, ctas, 1, 1, self._threads, 1, 1, 0, stream, pointers, 0
        )  # fmt: skip

    def close(self) -> None:
        """Nothing of it runs any more."""
        self._call("cuModuleUnload", self._module)
