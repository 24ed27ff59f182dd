"""Measures at start what each way of copying costs here, and keeps the answer in a file.

Patterns are scattered at both ends, so that nothing merges; peers are measured when the
caller gives two ranges that this process may copy between (imported pages of another GPU).
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shared.kept_file import read_kept, write_kept
from shared.kernels.copy_pages.copies import Copies, CopyTimeout, Direction
from shared.kernels.copy_pages.costs import CostTable, Line, Way, from_json
from shared.kernels.copy_pages.cuda_copier import CudaCopier
from shared.kernels.copy_pages.driver import CopyDriver
from shared.kernels.copy_pages.host_memory import move
from shared.kernels.copy_pages.plan import Always, Choice, Limits, Method

WHAT = "costs of copies"
SIZES = (4 << 10, 32 << 10, 128 << 10, 512 << 10, 2 << 20, 8 << 20)
LANES = (1, 2, 4)
CAPS = (256, 1024, 4096)
CAP_PIECE_BYTES = 32 << 10
ARENA_BYTES = 128 << 20
MAX_SET_BYTES = 64 << 20
MAX_SET_COPIES = 2048
REPEATS = 3
TIMEOUT_S = 20.0
FLOOR_US = 0.01


@dataclass(frozen=True, slots=True)
class Effort:
    """How much a measurement does: about 160 sets of at most 64 MiB, four times each, by default."""

    sizes: Sequence[int] = SIZES
    lanes: Sequence[int] = LANES
    caps: Sequence[int] = CAPS
    repeats: int = REPEATS
    arena_bytes: int = ARENA_BYTES  # of pinned and of device memory, each, while it runs


@dataclass(frozen=True, slots=True)
class Arena:
    """Two disjoint ranges of `num_bytes` to copy between."""

    source: int
    target: int
    num_bytes: int


def scattered(arena: Arena, size: int, count: int, seed: int = 0) -> Copies:
    """`count` copies of `size` bytes, random places at both ends, no two neighbours in both."""
    random = np.random.default_rng(seed)
    rows = arena.num_bytes // size
    sources = np.sort(random.permutation(rows)[:count]).astype(np.uint64)[::-1] * np.uint64(size)
    targets = random.permutation(rows)[:count].astype(np.uint64) * np.uint64(size)
    return Copies.of(sources + np.uint64(arena.source), targets + np.uint64(arena.target), size)


def timed_us(
    copier: CudaCopier, copies: Copies, direction: Direction, stream: int, choice: Choice
) -> tuple[float, float]:
    """Wall time of one set, submit to done, and of submit alone, us. Polls without sleep."""
    begin = time.perf_counter()
    ticket = copier.submit(
        copies, direction, stream=stream, chooser=Always(choice), merging=False, kernels=True
    )
    submitted = time.perf_counter()
    deadline = begin + TIMEOUT_S
    while not ticket.done():
        if time.perf_counter() > deadline:
            raise CopyTimeout(f"{len(copies)} copies {direction} still run after {TIMEOUT_S} s")
    return (time.perf_counter() - begin) * 1e6, (submitted - begin) * 1e6


def _line(
    copier: CudaCopier, arena: Arena, way: Way, stream: int, sizes: Sequence[int], repeats: int
) -> Line | None:
    direction, method, lanes = way
    choice = Choice(method, lanes)
    each, held, used, fixed = [], [], [], 0.0
    for size in sizes:
        count = min(MAX_SET_COPIES, MAX_SET_BYTES // size, arena.num_bytes // size)
        if count < 2:
            continue
        many = scattered(arena, size, count)
        both = [timed_us(copier, many, direction, stream, choice) for _ in range(repeats + 1)][1:]
        times = [wall for wall, _ in both]
        if not used:
            few = scattered(arena, size, 2)
            pair = [timed_us(copier, few, direction, stream, choice)[0] for _ in range(repeats + 1)][1:]
            fixed = max(0.0, min(min(pair) - 2 * min(times) / count, min(times) / 2))
        used.append(size)
        each.append(max(FLOOR_US, (min(times) - min(fixed, min(times) / 2)) / count))
        held.append(min(submitting for _, submitting in both) / count)
    return Line(fixed, tuple(used), tuple(each), tuple(held)) if used else None


def _best_cap(opened: Callable[[int], CudaCopier], arena: Arena, stream: int, effort: Effort) -> int:
    """Descriptors a batch call: many cost fewer calls, few let the copy engine begin while the rest is submitted."""
    count = min(MAX_SET_COPIES * 2, arena.num_bytes // CAP_PIECE_BYTES)
    copies = scattered(arena, CAP_PIECE_BYTES, count)
    times: dict[int, float] = {}
    for cap in effort.caps:
        copier, one = opened(cap), Choice(Method.BATCH)
        tries = [
            timed_us(copier, copies, Direction.DEVICE_TO_HOST, stream, one)[0]
            for _ in range(effort.repeats + 1)
        ]
        times[cap] = min(tries[1:])
    return min(times, key=lambda cap: times[cap])


def _cpu_move(host: int, num_bytes: int, sizes: Sequence[int], repeats: int) -> Line:
    """The CPU's part of staging: scattered pieces into a dense slot."""
    half = num_bytes // 2
    each = []
    for size in sizes:
        count = min(MAX_SET_COPIES, (8 << 20) // size + 1, half // size)
        copies = scattered(Arena(host, host + half, half), size, count)
        dense = host + half + np.arange(count, dtype=np.uint64) * np.uint64(size)
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            move(dense, copies.sources, copies.sizes)
            times.append((time.perf_counter() - begin) * 1e6)
        each.append(max(FLOOR_US, min(times) / count))
    return Line(0.0, tuple(sizes), tuple(each))


def measure(driver: CopyDriver, *, peer: Arena | None = None, effort: Effort | None = None) -> CostTable:
    """The cost table of this machine. Raises: CopyFailed, CopyTimeout."""
    effort = effort or Effort()
    arena_bytes, sizes = effort.arena_bytes, effort.sizes
    driver.make_current()
    host, device = driver.allocate_host(arena_bytes), driver.allocate_device(arena_bytes)
    stream = driver.create_stream()
    half = arena_bytes // 2
    arenas = {
        Direction.HOST_TO_DEVICE: Arena(host, device, arena_bytes),
        Direction.DEVICE_TO_HOST: Arena(device, host, arena_bytes),
        Direction.DEVICE_TO_DEVICE: Arena(device, device + half, half),
        **({Direction.PEER: peer} if peer else {}),
    }
    ways: list[tuple[Method, int]] = [(Method.LOOP, 1)]
    if driver.has_batch:
        ways += [(Method.BATCH, count) for count in effort.lanes]
    if driver.has_kernel:
        ways += [(Method.KERNEL, count) for count in effort.lanes]
    lines: dict[Way, Line] = {}
    copiers: list[CudaCopier] = []

    def opened(cap: int) -> CudaCopier:
        copiers.append(CudaCopier(driver, limits=Limits(max_descriptors=cap)))
        return copiers[-1]

    try:
        cap = effort.caps[-1]
        if driver.has_batch:
            cap = _best_cap(opened, arenas[Direction.DEVICE_TO_HOST], stream, effort)
        copier = opened(cap)
        for direction, arena in arenas.items():
            for method, count in ways:
                way = (direction, method, count)
                if (line := _line(copier, arena, way, stream, sizes, effort.repeats)) is not None:
                    lines[way] = line
        cpu = _cpu_move(host, arena_bytes, [size for size in sizes if size <= half], effort.repeats)
    finally:
        for copier in copiers:  # before memory goes: what still runs uses it
            copier.close()
        driver.destroy_stream(stream)
        driver.free_device(device)
        driver.free_host(host)
    return CostTable(driver.key, lines, cpu, driver.has_batch, cap)


def cache_path(folder: Path, key: str) -> Path:
    """Where the table of a machine is kept."""
    return folder / f"copy-costs-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"


def load_or_measure(
    driver: CopyDriver, folder: Path | None, *, peer: Arena | None = None, effort: Effort | None = None
) -> CostTable:
    """The table kept in `folder` for this machine and driver, or a new one, kept for the next start.

    A table without peer lines is measured again once a peer is there. A file that cannot be read is measured anew; one
    that cannot be written is said in the log.
    """
    path = cache_path(folder, driver.key) if folder else None
    if path is not None and (kept := read_kept(path, WHAT)) is not None:
        table = from_json(kept.decode(errors="replace"), key=driver.key)
        if table is not None and (peer is None or any(way[0] is Direction.PEER for way in table.lines)):
            return table
    table = measure(driver, peer=peer, effort=effort)
    if path is not None:
        write_kept(path, table.to_json().encode(), WHAT)
    return table


def open_copier(
    driver: CopyDriver, folder: Path | None, *, peer: Arena | None = None, effort: Effort | None = None
) -> CudaCopier:
    """A copier with the costs and limits of this machine; see load_or_measure."""
    table = load_or_measure(driver, folder, peer=peer, effort=effort)
    return CudaCopier(driver, chooser=table, limits=table.limits())
