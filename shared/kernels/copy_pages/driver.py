"""The few driver calls that copying needs, on plain integers: CUDA's, behind an interface that a fake can stand for.

`cuda.bindings` turns lists into C arrays on every call, 0.4 us a descriptor; here the two hot calls go through the
driver's own entry points (`cuGetProcAddress`) with the numpy columns as they are, and without the GIL.
"""

import ctypes
import importlib
import logging
from typing import Any, Protocol

import numpy as np

from shared.kernels.copy_pages.copies import U64, CopyFailed, CopyUnavailable, Order
from shared.kernels.copy_pages.pieces_kernel import PiecesKernel, digest

logger = logging.getLogger(__name__)

BATCH_ABI = 13000  # cuMemcpyBatchAsync of CUDA 13: without 12.8's failIdx


class CopyDriver(Protocol):
    """Streams, events and memory are integers. Every call raises CopyFailed when the driver refuses."""

    has_batch: bool

    @property
    def has_kernel(self) -> bool:
        """Whether copy_rows() is there. Cost: 0.3 s the first time, for compiling."""
        ...

    @property
    def key(self) -> str:
        """Names the device, driver and batch call: costs measured under one key hold for it."""
        ...

    def make_current(self) -> None:
        """Bind the device's primary context to the calling thread (another GPU's copier may have left its own)."""
        ...

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """cuMemcpyAsync."""
        ...

    def copy_batch(self, targets: U64, sources: U64, sizes: U64, order: Order, stream: int) -> None:
        """cuMemcpyBatchAsync; the columns may be reused when it returns. `stream` is never 0."""
        ...

    def copy_rows(self, table: int, rows: int, ctas: int, stream: int) -> None:
        """pieces.cu over a table of `rows` aligned copies in pinned memory, which stays as it is until it is done."""
        ...

    def create_stream(self) -> int:
        """A stream that does not wait for the legacy default stream."""
        ...

    def destroy_stream(self, stream: int) -> None:
        """What it still has to do is done first, in the background."""
        ...

    def create_event(self) -> int:
        """Without timing."""
        ...

    def destroy_event(self, event: int) -> None:
        """Also while it is pending."""
        ...

    def record(self, event: int, stream: int) -> None:
        """The event passes when the stream's work of now is done."""
        ...

    def wait_event(self, stream: int, event: int) -> None:
        """Later work of the stream waits for the event's last record."""
        ...

    def passed(self, event: int) -> bool:
        """Whether the event's last record has passed; True before the first."""
        ...

    def allocate_host(self, num_bytes: int) -> int:
        """Pinned memory; the caller frees it."""
        ...

    def free_host(self, address: int) -> None:
        """Of allocate_host."""
        ...

    def register_host(self, address: int, num_bytes: int) -> None:
        """Page-lock memory of this process (a memfd's mapping), for every context."""
        ...

    def unregister_host(self, address: int) -> None:
        """Before the mapping goes."""
        ...

    def allocate_device(self, num_bytes: int) -> int:
        """For measurements; KV pages come from shared/vmm."""
        ...

    def free_device(self, address: int) -> None:
        """Of allocate_device."""
        ...

    def close(self) -> None:
        """Release the context."""
        ...


class CudaDriver:
    """One GPU's primary context, the same one that torch uses."""

    def __init__(self, device: int = 0) -> None:
        """Raises: CopyUnavailable without the bindings, the driver library or the device."""
        try:
            cuda: Any = importlib.import_module("cuda.bindings.driver")
            (status,) = cuda.cuInit(0)
        except (ImportError, RuntimeError, OSError) as error:
            raise CopyUnavailable(f"no CUDA driver: {str(error).splitlines()[0]}") from error
        self._cuda = cuda
        if status != cuda.CUresult.CUDA_SUCCESS:
            raise CopyUnavailable(f"cuInit: {status.name}")
        try:
            self._device = self._call("cuDeviceGet", device)
            self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        except CopyFailed as error:
            raise CopyUnavailable(error.message) from error
        self._closed = False
        self.make_current()
        self._copy = self._entry("cuMemcpyAsync", 4000, _COPY)
        self._batch = self._entry("cuMemcpyBatchAsync", BATCH_ABI, _BATCH)
        self.has_batch = self._batch is not None
        self._attributes = {order: self._attributes_of(order) for order in Order}
        self._kernel: PiecesKernel | str | None = None  # the kernel, or why there is none; None: not tried
        self._first = np.zeros(1, np.uint64)
        # addresses of these: to ask for them costs as much as the call
        self._at_attributes = {order: int(made.getPtr()) for order, made in self._attributes.items()}
        self._at_first = int(self._first.ctypes.data)

    @property
    def key(self) -> str:
        """GPU, driver version, kind of batch call."""
        name = bytes(self._call("cuDeviceGetName", 128, self._device)).split(b"\0")[0].decode()
        version = self._call("cuDriverGetVersion")
        batch = f"batch {BATCH_ABI}" if self.has_batch else "no batch"
        return (
            f"{name}, driver {version}, {batch}, {f'kernel {digest()}' if self.has_kernel else 'no kernel'}"
        )

    @property
    def has_kernel(self) -> bool:
        """See CopyDriver."""
        if self._kernel is None:
            self.make_current()
            try:
                self._kernel = PiecesKernel(self._cuda, self._device)
            except CopyUnavailable as error:
                self._kernel = error.message
                logger.warning("small copies go by copy engines alone: %s", error.message)
        return isinstance(self._kernel, PiecesKernel)

    def copy_rows(self, table: int, rows: int, ctas: int, stream: int) -> None:
        """See CopyDriver."""
        if not self.has_kernel or not isinstance(self._kernel, PiecesKernel):
            raise CopyFailed("pieces.cu", f"{self._kernel}")
        self._kernel.launch(table, rows, ctas, stream)

    def _call(self, name: str, *args: Any) -> Any:
        status, *values = getattr(self._cuda, name)(*args)
        if status != self._cuda.CUresult.CUDA_SUCCESS:
            raise CopyFailed(name, getattr(status, "name", str(status)))
        return values[0] if values else None

    @property
    def context(self) -> int:
        """The device's primary context."""
        return int(self._context)

    def batch_words(self, order: Order) -> tuple[int, int]:
        """Addresses of what cuMemcpyBatchAsync wants to know once for all copies; good as long as this object is."""
        return self._at_attributes[order], self._at_first

    def entry(self, name: str, abi: int) -> int:
        """The address of the driver's function, as it was since version `abi`; 0: this driver has none."""
        cuda = self._cuda
        status, address, found = cuda.cuGetProcAddress(name.encode(), abi, 0)
        success = cuda.CUdriverProcAddressQueryResult.CU_GET_PROC_ADDRESS_SUCCESS
        return int(address) if status == cuda.CUresult.CUDA_SUCCESS and found == success else 0

    def _entry(self, name: str, abi: int, prototype: Any) -> Any:
        address = self.entry(name, abi)
        return prototype(address) if address else None

    def _attributes_of(self, order: Order) -> Any:
        attributes = self._cuda.CUmemcpyAttributes()
        attributes.srcAccessOrder = self._cuda.CUmemcpySrcAccessOrder(int(order))
        return attributes  # location hints stay empty: they are for managed and pageable memory only

    def check(self, name: str, status: int) -> None:
        """Of a call's result. Raises: CopyFailed, unless it is a success."""
        if status:
            raise CopyFailed(name, self._cuda.CUresult(status).name)

    def make_current(self) -> None:
        """See CopyDriver."""
        self._call("cuCtxSetCurrent", self._context)

    def enable_peer(self, other: "CudaDriver") -> None:
        """Let this GPU reach the other's cuMemAlloc memory; pages of shared/vmm carry their access themselves.

        Raises: CopyFailed where the GPUs cannot reach each other.
        """
        self.make_current()
        (status,) = self._cuda.cuCtxEnablePeerAccess(other._context, 0)
        if status != self._cuda.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
            self.check("cuCtxEnablePeerAccess", int(status))

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """See CopyDriver."""
        self.check("cuMemcpyAsync", self._copy(target, source, num_bytes, stream))

    def copy_batch(self, targets: U64, sources: U64, sizes: U64, order: Order, stream: int) -> None:
        """See CopyDriver. Cost: about 0.4 us a descriptor of submission."""
        if self._batch is None:
            raise CopyFailed("cuMemcpyBatchAsync", "this driver has none of CUDA 13's kind")
        status = self._batch(
            targets.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            targets.size,
            self._at_attributes[order],
            self._at_first,
            1,
            stream,
        )
        self.check("cuMemcpyBatchAsync", status)

    def create_stream(self) -> int:
        """See CopyDriver."""
        return int(self._call("cuStreamCreate", self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING.value))

    def destroy_stream(self, stream: int) -> None:
        """See CopyDriver."""
        self._call("cuStreamDestroy", stream)

    def create_event(self) -> int:
        """See CopyDriver."""
        return int(self._call("cuEventCreate", self._cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING.value))

    def destroy_event(self, event: int) -> None:
        """See CopyDriver."""
        self._call("cuEventDestroy", event)

    def record(self, event: int, stream: int) -> None:
        """See CopyDriver."""
        self._call("cuEventRecord", event, stream)

    def wait_event(self, stream: int, event: int) -> None:
        """See CopyDriver."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def passed(self, event: int) -> bool:
        """See CopyDriver."""
        (status,) = self._cuda.cuEventQuery(event)
        if status == self._cuda.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self.check("cuEventQuery", int(status))
        return True

    def allocate_host(self, num_bytes: int) -> int:
        """See CopyDriver."""
        return int(self._call("cuMemHostAlloc", num_bytes, self._cuda.CU_MEMHOSTALLOC_PORTABLE))

    def free_host(self, address: int) -> None:
        """See CopyDriver."""
        self._call("cuMemFreeHost", address)

    def register_host(self, address: int, num_bytes: int) -> None:
        """See CopyDriver."""
        self._call("cuMemHostRegister", address, num_bytes, self._cuda.CU_MEMHOSTREGISTER_PORTABLE)

    def unregister_host(self, address: int) -> None:
        """See CopyDriver."""
        self._call("cuMemHostUnregister", address)

    def allocate_device(self, num_bytes: int) -> int:
        """See CopyDriver."""
        return int(self._call("cuMemAlloc", num_bytes))

    def free_device(self, address: int) -> None:
        """See CopyDriver."""
        self._call("cuMemFree", address)

    def close(self) -> None:
        """See CopyDriver. Streams, events and memory of this driver are to be released before."""
        if not self._closed:
            self._closed = True
            if isinstance(self._kernel, PiecesKernel):
                self.make_current()
                self._kernel.close()
            self._call("cuDevicePrimaryCtxRelease", self._device)


# CUresult f(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream)
_COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
# CUresult f(CUdeviceptr *dsts, *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attrs, size_t *attrsIdxs,
#            size_t numAttrs, CUstream)
_BATCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
)
