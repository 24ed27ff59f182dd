"""copy_pages on a GPU: every byte arrives, whatever the way, size and direction; what a racing writer may do."""

import importlib
import threading
import time

import numpy as np
import pytest

from shared.kernels.copy_pages.calibrate import load_or_measure, open_copier
from shared.kernels.copy_pages.copies import Copies, CopyFailed, CopyUnavailable, Direction, Order
from shared.kernels.copy_pages.cuda_copier import CudaCopier
from shared.kernels.copy_pages.driver import CudaDriver
from shared.kernels.copy_pages.host_memory import view
from shared.kernels.copy_pages.plan import Always, Choice, Method

pytestmark = pytest.mark.gpu

ARENA_BYTES = 128 << 20
SIZES = [4 << 10, 32 << 10, 256 << 10, 2 << 20, 8 << 20, 64 << 20]
WAYS = [
    Choice(Method.LOOP),
    Choice(Method.BATCH),
    Choice(Method.BATCH, 4),
    Choice(Method.STAGED),
    Choice(Method.KERNEL),
    Choice(Method.KERNEL, 4),
]
DIRECTIONS = [
    Direction.HOST_TO_DEVICE,
    Direction.DEVICE_TO_HOST,
    Direction.DEVICE_TO_DEVICE,
    Direction.PEER,
]
WAIT_S = 30.0


class Gpu:
    """Arenas of known bytes: the lower half of each is read, the upper half written."""

    def __init__(self, driver: CudaDriver) -> None:
        self.driver = driver
        self.host = driver.allocate_host(ARENA_BYTES)
        self.device = driver.allocate_device(ARENA_BYTES)
        self.back = driver.allocate_host(ARENA_BYTES)
        self.stream = driver.create_stream()
        self.copier = CudaCopier(driver)
        self.other: CudaDriver | None = None
        self.peer = 0
        words = view(self.host, ARENA_BYTES).view(np.uint64)
        words[:] = np.random.default_rng(1).integers(0, 2**63, words.size, np.uint64)
        self.pattern = view(self.host, ARENA_BYTES).copy()

    def find_peer(self) -> None:
        """Memory of a second GPU that the first one reaches, if there is one."""
        try:
            self.other = CudaDriver(1)
            self.peer = self.other.allocate_device(ARENA_BYTES)
            self.driver.enable_peer(self.other)
        except (CopyUnavailable, CopyFailed):
            self.peer = 0
        self.driver.make_current()

    def bases(self, direction: Direction) -> tuple[int, int]:
        """(source, target) arenas."""
        match direction:
            case Direction.HOST_TO_DEVICE:
                return self.host, self.device
            case Direction.DEVICE_TO_HOST:
                return self.device, self.back
            case Direction.DEVICE_TO_DEVICE:
                return self.device, self.device
        if not self.peer:
            pytest.skip("needs a second GPU within reach")
        return self.peer, self.device

    def plain(self, source: int, target: int, num_bytes: int) -> None:
        """One copy, done when this returns."""
        ticket = self.copier.submit(
            Copies.of([source], [target], num_bytes), Direction.DEVICE_TO_DEVICE, stream=self.stream
        )
        ticket.wait(WAIT_S)

    def read(self, address: int) -> np.ndarray:
        """An arena's bytes, wherever it is."""
        if address in (self.host, self.back):
            return view(address, ARENA_BYTES).copy()
        scratch = self.driver.allocate_host(ARENA_BYTES)
        self.plain(address, scratch, ARENA_BYTES)
        found = view(scratch, ARENA_BYTES).copy()
        self.driver.free_host(scratch)
        return found

    def verify(
        self, copies: Copies, direction: Direction, way: Choice | None, order: Order = Order.STREAM
    ) -> None:
        """Copy offsets of arenas filled with the pattern; compare all bytes of the target's arena."""
        source, target = self.bases(direction)
        for arena in sorted({source, target} - {self.host}, key=lambda arena: arena == self.peer):
            self.plain(self.device if arena == self.peer else self.host, arena, ARENA_BYTES)
        want = self.pattern.copy()
        for start, end, size in copies.rows():
            want[end : end + size] = self.pattern[start : start + size]
        absolute = Copies(
            copies.sources + np.uint64(source), copies.targets + np.uint64(target), copies.sizes
        )
        self.copier.submit(
            absolute,
            direction,
            stream=self.stream,
            order=order,
            staging=way is not None and way.method is Method.STAGED,
            kernels=True,
            chooser=Always(way) if way else None,
        ).wait(WAIT_S)
        assert np.array_equal(self.read(target), want)
        if target == self.host:
            view(self.host, ARENA_BYTES)[:] = self.pattern


@pytest.fixture(scope="module")
def gpu():
    try:
        driver = CudaDriver(0)
    except CopyUnavailable as error:
        pytest.skip(error.message)
    made = Gpu(driver)
    made.find_peer()
    return made


def scattered(size: int, count: int, seed: int) -> Copies:
    """Offsets: sources in the lower half of an arena, targets in the upper one."""
    random = np.random.default_rng(seed)
    rows = ARENA_BYTES // 2 // size
    sources = random.permutation(rows)[:count] * size
    targets = random.permutation(rows)[:count] * size + ARENA_BYTES // 2
    return Copies.of(sources, targets, size)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.method}-{way.lanes}")
@pytest.mark.parametrize("size", SIZES)
def test_every_byte_arrives_and_no_other_changes(gpu, size, way, direction):
    gpu.verify(scattered(size, min(512, ARENA_BYTES // 2 // size), size), direction, way)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.method}-{way.lanes}")
def test_ten_thousand_random_descriptors_arrive(gpu, way, direction):
    """Ragged sizes at odd addresses, some of them neighbours, in random order."""
    random = np.random.default_rng(9)
    sizes = random.choice([1, 7, 64, 1000, 4096, 9999, 24576], 10_000)
    gaps = random.choice([0, 0, 1, 13], 10_000)
    targets = ARENA_BYTES // 2 + np.cumsum(sizes + gaps) - sizes
    follow = random.random(10_000) < 0.5
    sources = np.where(
        follow, targets - ARENA_BYTES // 2, random.integers(0, ARENA_BYTES // 2 - 24576, 10_000)
    )
    assert targets[-1] + sizes[-1] <= ARENA_BYTES
    order = random.permutation(10_000)
    gpu.verify(Copies.of(sources[order], targets[order], sizes[order]), direction, way)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("order", list(Order))
def test_every_order_gives_the_same_bytes_when_nobody_writes(gpu, order, direction):
    gpu.verify(scattered(32 << 10, 600, 5), direction, Choice(Method.BATCH), order)
    gpu.verify(scattered(2 << 20, 1, 6), direction, None, order)


def test_measured_costs_choose_a_way_and_the_bytes_arrive(gpu, tmp_path):
    begin_s = time.monotonic()
    table = load_or_measure(gpu.driver, tmp_path)
    print(f"\nmeasured in {time.monotonic() - begin_s:.2f} s\n{table.render()}")
    measured = open_copier(gpu.driver, tmp_path)
    before, gpu.copier = gpu.copier, measured
    try:
        for direction in DIRECTIONS[:3]:
            gpu.verify(scattered(32 << 10, 2000, 8), direction, None)
    finally:
        gpu.copier = before
        measured.close()


# A racing writer. A gate keeps the copy's stream from getting to the copy until the test opens it.

OLD, NEW = 0x11, 0xEE
RACE_BYTES = 64 << 10
RACE_COPIES = 8
GUARD_S = 2.0  # a call that waits for its stream would never see the gate open otherwise


class Race:
    """Sources full of OLD, a writer that makes them NEW, targets full of 0."""

    def __init__(self, gpu: Gpu, direction: Direction) -> None:
        self.gpu = gpu
        self.direction = direction
        self.cuda = importlib.import_module("cuda.bindings.driver")
        source, target = gpu.bases(direction)
        self.source, self.target = source, target + ARENA_BYTES // 2
        self.host_source = direction is Direction.HOST_TO_DEVICE
        self.num_bytes = 2 * RACE_BYTES * RACE_COPIES
        self.gate = gpu.driver.allocate_host(4096)
        self.word = view(self.gate, 4).view(np.uint32)
        self.writer = gpu.driver.create_stream()
        self.values = {value: self.device_bytes(value) for value in (0, OLD, NEW)}
        self.fill(self.source, OLD, gpu.stream)
        self.fill(self.target, 0, gpu.stream)
        self.settle(gpu.stream)

    def device_bytes(self, value: int) -> int:
        """Device memory full of one value."""
        address = self.gpu.driver.allocate_device(self.num_bytes)
        (status,) = self.cuda.cuMemsetD8Async(address, value, self.num_bytes, self.gpu.stream)
        assert status == self.cuda.CUresult.CUDA_SUCCESS, status
        return address

    def fill(self, address: int, value: int, stream: int) -> None:
        """Write memory of any kind in stream order: a copy from the device, which no host memory makes wait."""
        self.gpu.driver.copy(address, self.values[value], self.num_bytes, stream)

    def settle(self, stream: int) -> None:
        """Wait for a stream."""
        event = self.gpu.driver.create_event()
        self.gpu.driver.record(event, stream)
        deadline_s = time.monotonic() + WAIT_S
        while not self.gpu.driver.passed(event):
            assert time.monotonic() < deadline_s
        self.gpu.driver.destroy_event(event)

    def close_gate(self) -> threading.Timer:
        """The copy's stream stands still from here on; a timer opens the gate in the end."""
        self.word[0] = 0
        (status,) = self.cuda.cuStreamWaitValue32(self.gpu.stream, self.gate, 1, 0)
        assert status == self.cuda.CUresult.CUDA_SUCCESS, status
        guard = threading.Timer(GUARD_S, self.open_gate)
        guard.start()
        return guard

    def open_gate(self) -> None:
        """Let the stream go on."""
        self.word[0] = 1

    def submit(self, order: Order):
        """Scattered copies, so that a batch call it is."""
        places = np.arange(RACE_COPIES) * 2 * RACE_BYTES
        copies = Copies.of(self.source + places, self.target + places[::-1], RACE_BYTES)
        batch = Always(Choice(Method.BATCH))
        return self.gpu.copier.submit(
            copies, self.direction, stream=self.gpu.stream, order=order, chooser=batch
        )

    def seen(self) -> str:
        """What the targets hold."""
        out = self.gpu.driver.allocate_host(self.num_bytes)
        self.gpu.plain(self.target, out, self.num_bytes)
        values = set(view(out, self.num_bytes).reshape(RACE_COPIES, 2, RACE_BYTES)[:, 0].ravel().tolist())
        self.gpu.driver.free_host(out)
        return {frozenset([OLD]): "old", frozenset([NEW]): "new"}.get(frozenset(values), f"mixed {values}")

    def earlier_writer(self, order: Order) -> str:
        """The writer is before the copy on the same stream."""
        guard = self.close_gate()
        self.fill(self.source, NEW, self.gpu.stream)
        ticket = self.submit(order)
        self.open_gate()
        guard.cancel()
        ticket.wait(WAIT_S)
        return self.seen()

    def later_writer(self, order: Order) -> str:
        """The writer is another stream (of host sources: the CPU), right after submit, without waiting."""
        guard = self.close_gate()
        ticket = self.submit(order)
        if self.host_source:
            view(self.source, self.num_bytes)[:] = NEW
        else:
            self.fill(self.source, NEW, self.writer)
            self.settle(self.writer)
        self.open_gate()
        guard.cancel()
        ticket.wait(WAIT_S)
        return self.seen()

    def close(self) -> None:
        """Put the arena's pattern back."""
        self.open_gate()
        self.settle(self.gpu.stream)
        view(self.gpu.host, ARENA_BYTES)[:] = self.gpu.pattern
        self.gpu.driver.destroy_stream(self.writer)
        for address in self.values.values():
            self.gpu.driver.free_device(address)
        self.gpu.driver.free_host(self.gate)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("order", list(Order))
def test_a_racing_writer_is_seen_or_not_as_the_order_says(gpu, order, direction):
    """STREAM never misses an earlier writer of its stream; DURING_CALL never sees a later one. The rest is printed."""
    found = {}
    for writer in ("earlier_writer", "later_writer"):
        race = Race(gpu, direction)
        try:
            found[writer] = getattr(race, writer)(order)
        finally:
            race.close()
    print(f"\n{direction:17} {order.name:12} " + ", ".join(f"{key}: {value}" for key, value in found.items()))
    if order is Order.STREAM:
        assert found["earlier_writer"] == "new"
    if order is Order.DURING_CALL:
        assert found["later_writer"] == "old"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_after_the_ticket_is_done_any_writer_is_safe(gpu, direction):
    race = Race(gpu, direction)
    try:
        race.submit(Order.ANY).wait(WAIT_S)
        race.fill(race.source, NEW, race.writer)
        race.settle(race.writer)
        assert race.seen() == "old"
    finally:
        race.close()
