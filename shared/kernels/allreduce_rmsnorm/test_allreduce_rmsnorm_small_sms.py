"""GPUs whose CTAs have little shared memory (sm_120, sm_121: 99 KiB): the operation can be had, in ways that fit."""

import ctypes
import importlib
from types import SimpleNamespace

import pytest
import torch

from shared.kernels.allreduce_rmsnorm import driver
from shared.kernels.allreduce_rmsnorm.acted_driver import ActedDriver, ActedGroup
from shared.kernels.allreduce_rmsnorm.arenas import Arena
from shared.kernels.allreduce_rmsnorm.calibrate import two_shot_ways
from shared.kernels.allreduce_rmsnorm.driver import FusedDriver, KernelDriver
from shared.kernels.allreduce_rmsnorm.errors import FusedRefused
from shared.kernels.allreduce_rmsnorm.fused import CudaFused, FusedSettings
from shared.kernels.allreduce_rmsnorm.plan import Algorithm, Engine

SMALL, LARGE = 99 << 10, 227 << 10  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN


class Status(int):
    name = "CUDA_ERROR_INVALID_VALUE"


class Gpu:
    """cuda.bindings.driver of a device that takes no function that wants more shared memory than it has."""

    CU_MEMHOSTALLOC_PORTABLE = CU_MEMHOSTALLOC_DEVICEMAP = 0
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="dynamic")

    class CUdevice_attribute:
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = "major"
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = "minor"
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = "sms"
        CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED = "multicast"
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = "shared"

    def __init__(self, capability: tuple[int, int], shared_bytes: int) -> None:
        major, minor = capability
        self.attributes = {"major": major, "minor": minor, "sms": 188, "multicast": 0, "shared": shared_bytes}
        self.word = ctypes.c_uint32(0)
        self.loaded: list[str] = []

    def cuDeviceGetAttribute(self, which: str, device: int) -> tuple[Status, int]:
        return Status(0), self.attributes[which]

    def cuModuleGetFunction(self, module: int, name: bytes) -> tuple[Status, str]:
        self.loaded.append(name.decode())
        return Status(0), name.decode()

    def cuFuncSetAttribute(self, function: str, which: str, value: int) -> tuple[Status]:
        return (Status(value > self.attributes["shared"]),)

    def cuMemHostAlloc(self, size: int, flags: int) -> tuple[Status, int]:
        return Status(0), ctypes.addressof(self.word)

    def __getattr__(self, name: str):
        gives = name in {"cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuModuleLoadData"}
        return lambda *_: (Status(0), 1) if gives else (Status(0),)


def opened(world: int, hidden: int, kind: FusedDriver) -> CudaFused:
    settings = FusedSettings(hidden, 4)
    memory = torch.zeros(settings.layout().num_bytes, dtype=torch.uint8)
    arena = Arena(memory, (memory.data_ptr(),) * world, 0, lambda: None)
    return CudaFused(settings, arena, 0, torch.device("cpu"), driver=kind)


def on(monkeypatch, gpu: Gpu) -> KernelDriver:
    real = importlib.import_module
    monkeypatch.setattr(
        driver.importlib, "import_module", lambda name: gpu if name == "cuda.bindings.driver" else real(name)
    )
    monkeypatch.setattr(driver, "compile_kernels", lambda shape, arch: SimpleNamespace(cubin=b""))
    return KernelDriver(0)


@pytest.mark.parametrize("capability", [(12, 0), (12, 1)])
@pytest.mark.parametrize(
    ("world", "hidden"), [(2, 2048), (2, 8192), (4, 8192), (8, 8192), (2, 16384), (8, 16384)]
)
def test_the_operation_can_be_had_where_a_cta_has_99_kib(monkeypatch, capability, world, hidden):
    gpu = Gpu(capability, SMALL)
    fused = opened(world, hidden, on(monkeypatch, gpu))
    assert fused.driver.shared_bytes == SMALL
    engine = fused.engine(Algorithm.TWO_SHOT)
    assert f"fused_{engine}" in gpu.loaded
    assert fused.shape.launch(engine, Algorithm.TWO_SHOT, 4, 188).shared_bytes <= SMALL - 1024
    assert two_shot_ways(engine)[0].engine is Engine.PLAIN
    assert engine is (Engine.PLAIN if (world, hidden) in {(8, 8192), (8, 16384)} else Engine.BULK)


def test_where_it_fits_bulk_copies_are_as_before_and_more_than_there_is_is_refused(monkeypatch):
    gpu = Gpu((9, 0), LARGE)
    fused = opened(8, 16384, on(monkeypatch, gpu))
    assert fused.engine(Algorithm.TWO_SHOT) is Engine.BULK
    assert fused.shape.most_shared_bytes == LARGE - 1024
    gpu.attributes["shared"] = SMALL
    with pytest.raises(FusedRefused, match="cuFuncSetAttribute"):
        on(monkeypatch, gpu).function(fused.shape, "fused_bulk")


def test_sums_of_long_rows_are_read_by_threads_where_bulk_copies_do_not_fit():
    group = ActedGroup(8)
    kind = ActedDriver(group)
    kind.capability, kind.shared_bytes = (12, 0), SMALL
    fused = opened(8, 16384, kind)
    assert fused.engine(Algorithm.TWO_SHOT) is Engine.PLAIN
    assert fused.way(Algorithm.TWO_SHOT, 4, 16).engine is Engine.PLAIN
