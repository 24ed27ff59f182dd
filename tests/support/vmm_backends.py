"""The implementations that tests/conformance/test_vmm_windows.py holds to one interface, with access to bytes."""

import ctypes

from shared.vmm.cuda_driver import CudaVmmDriver
from shared.vmm.cuda_pages import CudaPages
from shared.vmm.errors import VmmUnavailable
from shared.vmm.memfd_pages import MemfdPages
from tests.support.fake_vmm_driver import FakeVmmDriver

NAMES = ("memfd", "fake-cuda", "cuda")


class HostBytes:
    """Reads and writes memory that the CPU sees."""

    def read(self, address, count):
        return ctypes.string_at(address, count)

    def write(self, address, data):
        ctypes.memmove(address, data, len(data))


class MemfdBackend(HostBytes):
    page_bytes = 64 << 10

    def pages(self, num_pages):
        return MemfdPages(num_pages, self.page_bytes)

    def close(self):
        pass


class FakeCudaBackend(HostBytes):
    page_bytes = 128 << 10

    def __init__(self):
        self.driver = FakeVmmDriver()

    def pages(self, num_pages):
        return CudaPages(self.driver, num_pages, self.page_bytes)

    def close(self):
        self.driver.close()


class CudaBackend:
    """Raises VmmUnavailable without a GPU."""

    page_bytes = 4 << 20

    def __init__(self):
        self.driver = CudaVmmDriver(0)

    def pages(self, num_pages):
        return CudaPages(self.driver, num_pages, self.page_bytes)

    def read(self, address, count):
        from cuda.bindings import driver

        data = bytearray(count)
        target = ctypes.addressof(ctypes.c_char.from_buffer(data))
        (status,) = driver.cuMemcpyDtoH(target, address, count)
        assert int(status) == 0, status
        return bytes(data)

    def write(self, address, data):
        from cuda.bindings import driver

        (status,) = driver.cuMemcpyHtoD(address, data, len(data))
        assert int(status) == 0, status

    def close(self):
        self.driver.close()


def make(name):
    """None when this machine has no such medium."""
    if name != "cuda":
        return MemfdBackend() if name == "memfd" else FakeCudaBackend()
    try:
        return CudaBackend()
    except VmmUnavailable:
        return None
