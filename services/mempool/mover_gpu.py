"""GPUs as the mover uses them, and its windows over the slabs of a space. CUDA is loaded when the first GPU is opened.

A window is one reserved range with every slab of a rank mapped side by side, so that page p is at p * page_bytes. Its
own GPU writes there; each other GPU that can reach it reads (cuMemSetAccess adds a GPU to those that have access).
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.mempool.memory import runs
from services.mempool.mover_regions import SlabRegion
from shared.errors import ClusterError
from shared.kernels.copy_pages.driver import CopyDriver, CudaDriver
from shared.transfer.cuda_window import load_driver
from shared.transfer.errors import PathUnavailable
from shared.vmm.cuda_driver import CudaVmmDriver, VmmDriver
from shared.vmm.errors import VmmError


@dataclass(frozen=True, slots=True, eq=False)
class Gpu:
    """One GPU's primary context. `device`: "cuda:" and its UUID in hex; `ordinal`: its number in this process."""

    device: str
    ordinal: int
    vmm: VmmDriver
    copy: CopyDriver

    def close(self) -> None:
        """Let go of the context."""
        self.copy.close()
        self.vmm.close()


OpenGpu = Callable[[str], Gpu]


def open_gpu(device: str) -> Gpu:
    """Raises: PathUnavailable when there is no such GPU here. Cost: a context, 0.3 s, for the first of a process."""
    driver = load_driver()
    status, count = driver.cuDeviceGetCount()
    for ordinal in range(count if int(status) == 0 else 0):
        _, found = driver.cuDeviceGet(ordinal)
        status, uuid = driver.cuDeviceGetUuid(found)
        if int(status) == 0 and device == f"cuda:{bytes(uuid.bytes).hex()}":
            try:
                with contextlib.ExitStack() as undo:
                    vmm = CudaVmmDriver(ordinal)
                    undo.callback(vmm.close)  # it is tried again: no context stays of what failed
                    gpu = Gpu(device, ordinal, vmm, CudaDriver(ordinal))
                    undo.pop_all()
                    return gpu
            except ClusterError as error:
                raise PathUnavailable(f"{device}: {error.message}") from error
    raise PathUnavailable(f"no GPU {device} is visible to the mempool")


class SlabWindow:
    """The slabs of one rank, mapped until close(); those without memory are holes.

    Args: stopping: asked between slabs; the mapping of a large space is given up when the mempool ends.
    Raises: PathUnavailable; nothing is mapped then.
    Cost: about 0.2 ms a slab (export, import, map, access), in the background; no descriptor stays open.
    """

    def __init__(self, gpu: Gpu, where: SlabRegion, stopping: Callable[[], bool]) -> None:
        self.gpu = gpu
        self._slabs = where.slabs
        self.slab_bytes = where.slab_bytes
        self._mapped: set[int] = set()
        self._readers: list[Gpu] = []
        num_slabs = where.num_pages * where.slabs_per_page // where.pages_per_slab
        if where.num_pages % where.pages_per_slab:
            raise PathUnavailable(f"{where.num_pages} pages do not fill slabs of {where.pages_per_slab}")
        self.size_bytes = num_slabs * self.slab_bytes
        try:
            gpu.vmm.make_current()
            self.address = gpu.vmm.reserve(self.size_bytes)
        except VmmError as error:
            raise PathUnavailable(f"{where.device}: {error.message}") from error
        try:
            for slab in range(num_slabs):
                if stopping():
                    raise PathUnavailable("the mempool ends")
                if self._slabs.is_present(slab):
                    self._map(slab)
            self._give_access(sorted(self._mapped), gpu, writable=True)
        except (ClusterError, OSError) as error:
            self.close()
            raise PathUnavailable(f"{where.device}: {error}") from error

    def _map(self, slab: int) -> None:
        vmm = self.gpu.vmm
        fd = self._slabs.export(slab)
        try:
            handle = vmm.import_fd(fd)
        finally:
            os.close(fd)
        try:
            vmm.map(self.address + slab * self.slab_bytes, self.slab_bytes, handle)
            self._mapped.add(slab)
        finally:
            vmm.release(handle)  # the mapping keeps the memory

    def _give_access(self, slabs: Sequence[int], to: Gpu, *, writable: bool) -> None:
        for first, count in runs(slabs):
            at = self.address + first * self.slab_bytes
            to.vmm.set_access(at, count * self.slab_bytes, to.vmm.access_address(writable))

    def allow(self, reader: Gpu) -> None:
        """Let another GPU read. Raises: VmmError when it cannot reach this one."""
        reader.vmm.make_current()
        self._give_access(sorted(self._mapped), reader, writable=False)
        self._readers.append(reader)

    def unmap(self, slabs: Sequence[int]) -> None:
        """Make holes of these (sorted), whose memory goes back to the system; no copy touches them any more."""
        self.gpu.vmm.make_current()
        for first, count in runs([slab for slab in slabs if slab in self._mapped]):
            self.gpu.vmm.unmap(self.address + first * self.slab_bytes, count * self.slab_bytes)
        self._mapped.difference_update(slabs)

    def remap(self, slabs: Sequence[int]) -> None:
        """These have memory again. Raises: ClusterError, OSError; then some of them may be holes still."""
        self.gpu.vmm.make_current()
        for slab in slabs:
            if slab not in self._mapped:
                self._map(slab)
        self._give_access(slabs, self.gpu, writable=True)
        for reader in self._readers:
            reader.vmm.make_current()
            self._give_access(slabs, reader, writable=False)

    def boundaries(self) -> range:
        """Where slabs begin, and the end: no copy may cross these."""
        return range(self.address, self.address + self.size_bytes + 1, self.slab_bytes)

    def close(self) -> None:
        """Unmap; nothing may be copying any more."""
        self.gpu.vmm.make_current()
        self.unmap(sorted(self._mapped))
        self.gpu.vmm.free_reservation(self.address, self.size_bytes)
