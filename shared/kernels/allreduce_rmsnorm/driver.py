"""Compiling the kernels and the few driver calls of a launch, on plain integers. Importing this needs neither.

Binaries of a shape are kept in this process, not on disk: one takes about a second.
"""

import ctypes
import hashlib
import importlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from shared.kernels.allreduce_rmsnorm.errors import FusedRefused, FusedUnavailable
from shared.kernels.allreduce_rmsnorm.plan import MAX_WORLD
from shared.kernels.allreduce_rmsnorm.shapes import KernelShape, Launch
from shared.kernels.nvrtc import Binary, CompilerUnavailable, SourceRefused, compile_source

SOURCE = Path(__file__).with_name("fused.cu")
HEADERS = tuple(SOURCE.with_name(name) for name in ("ptx.cuh", "rows.cuh", "push.cuh"))

_Pointers = ctypes.c_uint64 * MAX_WORLD


class Params(ctypes.Structure):
    """fused.cu's Params, field by field; its static_assert compares the sizes."""

    input: Any
    out: Any
    whole: Any
    flags: Any
    slots: Any
    _fields_ = [
        ("input", _Pointers),
        ("out", _Pointers),
        ("whole", _Pointers),
        ("flags", _Pointers),
        ("slots", _Pointers),
        ("input_all", ctypes.c_uint64),
        ("out_all", ctypes.c_uint64),
        ("weight", ctypes.c_uint64),
        ("residual", ctypes.c_uint64),
        ("epochs", ctypes.c_uint64),
        ("turns", ctypes.c_uint64),
        ("failed", ctypes.c_uint64),
        ("report", ctypes.c_uint64),
        ("timeout_ns", ctypes.c_uint64),
        ("row_start", ctypes.c_int32),
        ("row_stop", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("slot_rows", ctypes.c_int32),
        ("num_targets", ctypes.c_int32),
        ("gemma", ctypes.c_int32),
        ("eps", ctypes.c_float),
    ]


@cache
def compile_kernels(shape: KernelShape, arch: str) -> Binary:
    """Machine code of fused.cu for one shape; `arch` as "sm_90a". Needs no GPU.

    Raises: FusedUnavailable without NVRTC, FusedRefused with the compiler's log.
    Cost: about a second, once a process and shape.
    """
    defines = {**shape.defines(), "PARAMS_BYTES": ctypes.sizeof(Params)}
    try:
        return compile_source(SOURCE, arch, defines=defines, headers=HEADERS)
    except CompilerUnavailable as error:
        raise FusedUnavailable(error.message) from error
    except SourceRefused as error:
        raise FusedRefused(error.message) from error


@cache
def source_digest() -> str:
    """Of what is compiled: times of another kernel are not this one's. 16 hex digits."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in (SOURCE, *HEADERS))).hexdigest()[:16]


NO_LINK, UNKNOWN_LINK = -1, -2


def links_from(device: int, others: Sequence[int]) -> list[int]:
    """How a GPU reaches others, a number each, all by their places among those that this process sees.

    Equal numbers, links of one kind: the driver's performance rank of the pair, and whether one may read the other's
    memory and act atomically on it, as over NVLink; not how many links there are. NO_LINK: to itself; UNKNOWN_LINK: no
    driver, or it does not say. Cost: a few driver calls, no context.
    """
    try:
        cuda: Any = importlib.import_module("cuda.bindings.driver")
        (status,) = cuda.cuInit(0)
    except (ImportError, RuntimeError, OSError):
        return [UNKNOWN_LINK] * len(others)
    if int(status) != 0:
        return [UNKNOWN_LINK] * len(others)
    kind = cuda.CUdevice_P2PAttribute
    asked = (
        kind.CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED,
        kind.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED,
        kind.CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK,
    )

    def link(other: int) -> int:
        if other == device:
            return NO_LINK
        places = [cuda.cuDeviceGet(one) for one in (device, other)]
        if any(int(status) for status, _ in places):
            return UNKNOWN_LINK
        found = [cuda.cuDeviceGetP2PAttribute(one, *(place for _, place in places)) for one in asked]
        if any(int(status) for status, _ in found):
            return UNKNOWN_LINK
        access, atomics, rank = (int(value) for _, value in found)
        return access + 2 * atomics + 4 * rank

    return [link(other) for other in others]


class FusedDriver(Protocol):
    """What a launch needs of a GPU. Every call raises FusedRefused when the driver refuses.

    has_multicast: the driver says that the GPU could; whether the machine lets it is not tried.
    shared_bytes: the most shared memory of a CTA, what kernels declare themselves included.
    """

    num_sms: int
    shared_bytes: int
    capability: tuple[int, int]
    has_multicast: bool

    def function(self, shape: KernelShape, name: str) -> Any:
        """A kernel by name, ready to be launched."""
        ...

    def launch(self, function: Any, launch: Launch, stream: int, params: Params) -> None:
        """Stream-ordered; parameters are copied before this returns."""
        ...

    def allocate_word(self) -> "HostWord":
        """A zero in host memory that kernels may set; the caller closes it."""
        ...

    def free_word(self, address: int) -> None:
        """Of allocate_word."""
        ...

    def synchronize(self) -> None:
        """Until everything on the device is done."""
        ...

    def close(self) -> None:
        """Nothing of this driver runs any more."""
        ...


class KernelDriver:
    """One GPU's primary context, the one that torch uses; it has to exist already.

    Raises: FusedUnavailable without the bindings, the driver or the device.
    """

    def __init__(self, device: int) -> None:
        try:
            self._cuda: Any = importlib.import_module("cuda.bindings.driver")
            (status,) = self._cuda.cuInit(0)
        except (ImportError, RuntimeError, OSError) as error:
            raise FusedUnavailable(f"no CUDA driver: {(str(error).splitlines() or [''])[0]}") from error
        if int(status) != 0:
            raise FusedUnavailable(f"cuInit: {status.name}")
        self._device = self._call("cuDeviceGet", device)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self._functions: dict[tuple[KernelShape, str], Any] = {}
        self._modules: dict[KernelShape, Any] = {}
        kind = self._cuda.CUdevice_attribute
        major = self._attribute(kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        minor = self._attribute(kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        self.num_sms = self._attribute(kind.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        self.shared_bytes = self._attribute(kind.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        self.capability = (major, minor)
        self.has_multicast = bool(self._attribute(kind.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED))
        self.arch = f"sm_{major}{minor}" + ("a" if major >= 9 else "")

    def _call(self, name: str, *args: Any) -> Any:
        status, *values = getattr(self._cuda, name)(*args)
        if int(status) != 0:
            raise FusedRefused(f"{name}: {getattr(status, 'name', status)}")
        return values[0] if values else None

    def _attribute(self, which: Any) -> int:
        return int(self._call("cuDeviceGetAttribute", which, self._device))

    def function(self, shape: KernelShape, name: str) -> Any:
        """A kernel by name, compiled and loaded when it is asked for first: not while another one waits for a peer."""
        key = (shape, name)
        if key not in self._functions:
            self._call("cuCtxSetCurrent", self._context)
            if shape not in self._modules:
                self._modules[shape] = self._call("cuModuleLoadData", compile_kernels(shape, self.arch).cubin)
            found = self._call("cuModuleGetFunction", self._modules[shape], name.encode())
            if name == "fused_bulk":
                most = self._cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._call("cuFuncSetAttribute", found, most, shape.shared_bytes)
            self._call("cuFuncLoad", found)
            self._functions[key] = found
        return self._functions[key]

    def launch(self, function: Any, launch: Launch, stream: int, params: Params) -> None:
        """See FusedDriver."""
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        self._call(
            "cuLaunchKernel", function, launch.ctas, 1, 1, launch.threads, 1, 1, launch.shared_bytes, stream,
            ctypes.addressof(pointers), 0,
        )  # fmt: skip

    def allocate_word(self) -> "HostWord":
        """See FusedDriver."""
        flags = self._cuda.CU_MEMHOSTALLOC_PORTABLE | self._cuda.CU_MEMHOSTALLOC_DEVICEMAP
        return HostWord(int(self._call("cuMemHostAlloc", 4, flags)), self)

    def free_word(self, address: int) -> None:
        """See FusedDriver."""
        self._call("cuMemFreeHost", address)

    def synchronize(self) -> None:
        """See FusedDriver."""
        self._call("cuCtxSetCurrent", self._context)
        self._call("cuCtxSynchronize")

    def close(self) -> None:
        """Unload what was compiled, let go of the context."""
        for module in self._modules.values():
            self._call("cuModuleUnload", module)
        self._modules.clear()
        self._functions.clear()
        self._call("cuDevicePrimaryCtxRelease", self._device)


class HostWord:
    """32 bits in pinned host memory; device and host know it by one address."""

    def __init__(self, address: int, driver: FusedDriver) -> None:
        self.address = address
        self._driver = driver
        self._word = ctypes.c_uint32.from_address(address)
        self._word.value = 0

    def read(self) -> int:
        """Its value now."""
        return self._word.value

    def close(self) -> None:
        """No kernel may write it any more."""
        self._driver.free_word(self.address)
