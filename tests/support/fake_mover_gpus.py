"""GPUs for the mover without a GPU: real bytes in memfds, CUDA's rules, calls that can be held, refused or counted."""

import os
import threading

from services.mempool.mover_gpu import Gpu
from shared.kernels.copy_pages.recording_driver import RecordingDriver
from shared.transfer.errors import PathUnavailable
from shared.vmm.errors import VmmError
from tests.support.fake_vmm_driver import GRANULARITY_BYTES, FakeVmmDriver

PAGE_BYTES = GRANULARITY_BYTES // 2


class PeerVmm(FakeVmmDriver):
    """Reads other fakes' windows, unless the two are apart. `peers` is shared by all of them."""

    def __init__(self, name, peers, apart):
        super().__init__()
        self.name, self.peers, self.apart = name, peers, apart
        peers[name] = self

    def set_access(self, address, size_bytes, access):
        owner = next(
            one
            for one in self.peers.values()
            for at, size in one.reservations.items()
            if at <= address < at + size
        )
        if owner is self:
            super().set_access(address, size_bytes, access)
            return
        self.calls.append(("cuMemSetAccess", address, size_bytes, access))
        if {owner.name, self.name} in self.apart:
            raise VmmError("cuMemSetAccess: CUDA_ERROR_INVALID_DEVICE")


class LockedDriver(RecordingDriver):
    """A RecordingDriver for the mover's several threads, whose copies cross no allocation and no page-locked range."""

    def __init__(self, gpus, **how):
        self._lock = threading.RLock()
        self._gpus = gpus
        super().__init__(**how)

    def copy(self, target, source, num_bytes, stream):
        self._check(target, num_bytes)
        self._check(source, num_bytes)
        super().copy(target, source, num_bytes, stream)

    def copy_batch(self, targets, sources, sizes, order, stream):
        for addresses in (targets, sources):
            for address, size in zip(addresses.tolist(), sizes.tolist(), strict=True):
                self._check(address, size)
        super().copy_batch(targets, sources, sizes, order, stream)

    def _check(self, address, num_bytes):
        mapped = [
            (at, size) for vmm in self._gpus.vmms.values() for at, (size, _) in list(vmm.mapped.items())
        ]
        locked = [pair for one in self._gpus.drivers.values() for pair in list(one.registered.items())]
        for at, size in (*mapped, *locked):
            if at < address + num_bytes and address < at + size:
                assert at <= address < address + num_bytes <= at + size, "a copy over two allocations"

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name.startswith("_") or not callable(found):
            return found
        lock = super().__getattribute__("_lock")

        def locked(*args, **kwargs):
            with lock:
                return found(*args, **kwargs)

        return locked


class FakeGpus:
    """`open` is the mover's open_gpu. Devices are named by `device(n)`; those from `count` on do not exist."""

    def __init__(self, count=2, *, apart=(), **how):
        self.count, self.apart, self._how = count, [set(map(self.device, pair)) for pair in apart], how
        self.vmms, self.drivers = {}, {}

    @staticmethod
    def device(number):
        return f"cuda:{number:032x}"

    def open(self, device):
        number = int(device.removeprefix("cuda:"), 16)
        if number >= self.count:
            raise PathUnavailable(f"no GPU {device} is visible to the mempool")
        self.drivers[number] = LockedDriver(self, **self._how)
        return Gpu(device, number, PeerVmm(device, self.vmms, self.apart), self.drivers[number])

    def run(self):
        """Let every stream go on."""
        for driver in self.drivers.values():
            driver.run()


class FakeSlabs:
    """Slabs of services/mempool/slabs.py, in memfds that a test reads and writes."""

    def __init__(self, num_slabs, slab_bytes):
        self.slab_bytes = slab_bytes
        self.fds = [os.memfd_create("slab") for _ in range(num_slabs)]
        for fd in self.fds:
            os.ftruncate(fd, slab_bytes)

    def export(self, slab):
        return os.dup(self.fds[slab])

    def is_present(self, slab):
        return slab < len(self.fds)

    def read(self):
        return b"".join(os.pread(fd, self.slab_bytes, 0) for fd in self.fds)

    def write(self, content):
        for slab, fd in enumerate(self.fds):
            os.pwrite(fd, content[slab * self.slab_bytes : (slab + 1) * self.slab_bytes], 0)

    def close(self):
        for fd in self.fds:
            os.close(fd)
