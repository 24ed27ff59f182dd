"""What bench_swap.py measures with: memory of every kind, sets of copies, a clock, and vLLM's own call beside ours.

Everything goes through the driver, on one stream; a repetition is timed from the call to its event, by polling.
"""

import importlib
import importlib.util
import mmap
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shared.kernels.copy_pages.calibrate import CAPS
from shared.kernels.copy_pages.copies import Copies, CopyTimeout, Direction, Order
from shared.kernels.copy_pages.costs import CostTable
from shared.kernels.copy_pages.cuda_copier import CudaCopier
from shared.kernels.copy_pages.driver import CopyDriver
from shared.kernels.copy_pages.host_memory import view
from shared.kernels.copy_pages.plan import Chooser, Limits

MIB = 1 << 20
TIMEOUT_S = 20.0
NUM_CHECKED = 8
TRITON_BYTES = (
    28 << 10
)  # below it vLLM 0.26 reads host memory by a Triton kernel (kv_offload/cpu/gpu_worker.py)

Times = tuple[float, float]  # whole, and submission alone, us
Case = Callable[[], Times]


@dataclass(frozen=True, slots=True)
class Shape:
    """One row of vLLM PR 38460, "Handler-level benchmark": per-layer K and V tensors, us of its 8xH100 machine."""

    name: str
    tensors: int
    block_bytes: int  # of one tensor
    blocks: int
    pr_baseline_us: int
    pr_batched_us: int

    @property
    def page_bytes(self) -> int:
        """The same block as one page: all layers, K and V."""
        return self.tensors * self.block_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes moved."""
        return self.blocks * self.page_bytes


SHAPES = (
    Shape("LLaMA-8B", 64, 32 << 10, 64, 16_358, 4_519),
    Shape("LLaMA-70B", 160, 32 << 10, 64, 41_124, 10_239),
    Shape("LLaMA-70B TP4", 160, 8 << 10, 32, 20_427, 3_299),
    Shape("Qwen2.5-0.5B", 48, 4 << 10, 128, 23_484, 3_184),
    Shape("Qwen2.5-1.5B", 56, 8 << 10, 64, 14_042, 2_272),
    Shape("Qwen2.5-3B", 72, 8 << 10, 64, 18_045, 2_935),
    Shape("Phi-3-mini", 64, 24 << 10, 64, 15_963, 3_888),
)


def blocks_of(shape: Shape, device: int, host: int, direction: Direction, seed: int = 7) -> Copies:
    """The shape's copies on discrete tensors: block ids at random places, twice as many places as blocks."""
    random = np.random.default_rng(seed)
    places = 2 * shape.blocks
    tensor = (np.arange(shape.tensors) * (places * shape.block_bytes))[:, None]
    ends = [
        (base + tensor + random.permutation(places)[: shape.blocks][None, :] * shape.block_bytes).ravel()
        for base in (device, host)
    ]
    sources, targets = ends if direction is Direction.DEVICE_TO_HOST else reversed(ends)
    return Copies.of(sources, targets, shape.block_bytes)


def pages_of(size: int, count: int, device: int, host: int, direction: Direction, seed: int = 11) -> Copies:
    """Pages at random places, twice as many places as pages at both ends."""
    random = np.random.default_rng(seed)
    ends = [base + random.permutation(2 * count)[:count] * size for base in (device, host)]
    sources, targets = ends if direction is Direction.DEVICE_TO_HOST else reversed(ends)
    return Copies.of(sources, targets, size)


class SharedFile:
    """A memfd's mapping, as the mempool's host tier has it, page-locked when asked."""

    def __init__(self, driver: CopyDriver, num_bytes: int, *, locked: bool) -> None:
        self._driver = driver
        self._locked = locked
        file = os.memfd_create("quire-bench-swap")
        os.ftruncate(file, num_bytes)
        self._map = mmap.mmap(file, num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        os.close(file)
        self.address = int(np.frombuffer(self._map, np.uint8).ctypes.data)
        view(self.address, num_bytes)[:: mmap.PAGESIZE] = 1  # pages exist before anything is timed
        if locked:
            driver.register_host(self.address, num_bytes)

    def close(self) -> None:
        """Unlock and unmap."""
        if self._locked:
            self._driver.unregister_host(self.address)
        self._map.close()


def fill(address: int, num_bytes: int) -> None:
    """Every aligned 8 bytes get a number of their own, so that a misplaced page shows."""
    words = view(address, num_bytes).view(np.uint64)
    for first in range(0, words.size, MIB):
        part = words[first : first + MIB]
        part[:] = np.arange(first, first + part.size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


class Rig:
    """One GPU, a stream, pinned and device memory of `num_bytes` each, and a copier with measured costs."""

    def __init__(self, driver: CopyDriver, costs: CostTable, num_bytes: int) -> None:
        self.driver = driver
        self.num_bytes = num_bytes
        self.costs = costs
        self.host = driver.allocate_host(num_bytes)
        self.device = driver.allocate_device(num_bytes)
        self.scratch = driver.allocate_host(8 * MIB)
        self.stream = driver.create_stream()
        self.event = driver.create_event()
        self.copier = CudaCopier(driver, chooser=costs, limits=costs.limits())
        self.by_cap = {cap: CudaCopier(driver, limits=Limits(max_descriptors=cap)) for cap in CAPS}
        fill(self.host, num_bytes)
        self.plain(Copies.of([self.host], [self.device], num_bytes))()

    def close(self) -> None:
        """Free everything."""
        for copier in (self.copier, *self.by_cap.values()):
            copier.close()
        self.driver.destroy_event(self.event)
        self.driver.destroy_stream(self.stream)
        self.driver.free_device(self.device)
        self.driver.free_host(self.host)
        self.driver.free_host(self.scratch)

    def finished(self, begin_s: float) -> Times:
        """Wait for all that the stream has; times since `begin_s`."""
        submitted_s = time.perf_counter()
        self.driver.record(self.event, self.stream)
        while not self.driver.passed(self.event):
            if time.perf_counter() - begin_s > TIMEOUT_S:
                raise CopyTimeout(f"copies still run after {TIMEOUT_S} s")
        end_s = time.perf_counter()
        return (end_s - begin_s) * 1e6, (submitted_s - begin_s) * 1e6

    def plain(self, copies: Copies) -> Case:
        """One cuMemcpyAsync for each row, straight to the driver: the ceiling, with a single row."""
        rows = copies.rows()

        def case() -> Times:
            begin_s = time.perf_counter()
            for source, target, size in rows:
                self.driver.copy(target, source, size, self.stream)
            return self.finished(begin_s)

        return case

    def ours(
        self,
        copies: Copies,
        direction: Direction,
        chooser: Chooser | None = None,
        *,
        order: Order = Order.STREAM,
        merging: bool = True,
        staging: bool = False,
        cap: int = 0,
        kernels: bool = False,
    ) -> Case:
        """Through the copier, planning and checking included; `cap`: with so many descriptors a call. Host memory is
        page-locked where no chooser is given: a kernel may copy then, as any other way."""
        copier = self.by_cap[cap] if cap else self.copier
        kernels = kernels or (chooser is None and not staging)

        def case() -> Times:
            begin_s = time.perf_counter()
            ticket = copier.submit(
                copies,
                direction,
                stream=self.stream,
                order=order,
                chooser=chooser,
                merging=merging,
                staging=staging,
                kernels=kernels,
            )
            submitted_s = time.perf_counter()
            while not ticket.done():
                if time.perf_counter() - begin_s > TIMEOUT_S:
                    raise CopyTimeout(f"copies still run after {TIMEOUT_S} s")
            return (time.perf_counter() - begin_s) * 1e6, (submitted_s - begin_s) * 1e6

        return case

    def chosen(self, copies: Copies, direction: Direction, *, staging: bool = False) -> str:
        """The way that the cost table takes for a set, such as "batch x2"."""
        kernels = not staging
        ticket = self.copier.submit(copies, direction, stream=self.stream, staging=staging, kernels=kernels)
        ticket.wait(TIMEOUT_S)
        choice = ticket.plan.choice
        return f"{choice.method} x{choice.lanes}" if choice.lanes > 1 else str(choice.method)

    def check(self, copies: Copies, direction: Direction) -> None:
        """Compare some targets with their sources, byte for byte. Raises: RuntimeError."""
        step = max(1, len(copies) // NUM_CHECKED)
        for source, target, size in copies.rows()[::step]:
            size = min(size, 8 * MIB)
            device, host = (source, target) if direction is Direction.DEVICE_TO_HOST else (target, source)
            self.plain(Copies.of([device], [self.scratch], size))()
            if not np.array_equal(view(self.scratch, size), view(host, size)):
                raise RuntimeError(f"wrong bytes at {target:#x} after a copy {direction}")


def run_cases(cases: Mapping[str, Case], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Every case once to warm up, then `rounds` times, in turns, so that all see the same machine."""
    for case in cases.values():
        case()
    found: dict[str, dict[str, list[float]]] = {name: {"wall_us": [], "submit_us": []} for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            whole, submitting = case()
            found[name]["wall_us"].append(round(whole, 1))
            found[name]["submit_us"].append(round(submitting, 1))
    return found


class VllmSwap:
    """vLLM 0.26's swap_blocks_batch, called as its offloading worker calls it. A peer to be measured, so it is
    loaded by name and only if it is installed; no dependency of this project."""

    def __init__(self) -> None:
        """Raises: ImportError saying what is missing."""
        try:
            self._torch: Any = importlib.import_module("torch")
        except ImportError as error:
            raise ImportError(f"torch: {error}") from error
        if not self._torch.cuda.is_available():
            raise ImportError("torch has no CUDA here")
        self._batch = self._find()
        self._triton: Any = None
        try:
            module = importlib.import_module("vllm.v1.kv_offload.cpu.swap_blocks_triton")
            self._triton = module.swap_blocks_batch
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            print(f"  vLLM's Triton path is not here: {error!r:.120}")

    def _find(self) -> Any:
        try:
            importlib.import_module("vllm._custom_ops")
        except (ImportError, OSError, RuntimeError) as error:
            print(f"  vllm._custom_ops: {error!r:.120}; loading its libraries alone")
            spec = importlib.util.find_spec("vllm")
            folders = list(spec.submodule_search_locations or []) if spec else []
            for library in sorted(path for folder in folders for path in Path(folder).glob("_C*.so")):
                try:
                    self._torch.ops.load_library(str(library))
                except OSError as refused:
                    print(f"  {library.name}: {refused!s:.120}")
        try:
            return self._torch.ops._C_cache_ops.swap_blocks_batch
        except AttributeError as error:
            raise ImportError("vLLM's CUDA library with swap_blocks_batch") from error

    def case(self, rig: Rig, copies: Copies, direction: Direction) -> Case:
        """As vLLM chooses it: Triton for small blocks to the device, else its batch call; tensors made before."""
        torch = self._torch
        columns = (copies.sources, copies.targets, copies.sizes)
        sources, targets, sizes = (torch.from_numpy(column.astype(np.int64)) for column in columns)
        to_device = direction is Direction.HOST_TO_DEVICE
        largest = int(copies.sizes.max())
        small = to_device and largest < TRITON_BYTES and self._triton is not None
        chunk = min(1 << (largest - 1).bit_length(), 8192)
        stream = torch.cuda.ExternalStream(rig.stream)

        def case() -> Times:
            begin_s = time.perf_counter()
            with torch.cuda.stream(stream):
                if small:
                    self._triton(sources, targets, sizes, bytes_per_chunk=chunk)
                else:
                    self._batch(sources, targets, sizes, to_device)
            return rig.finished(begin_s)

        return case
