"""Copies by a kernel: when it may, when it is worth its multiprocessors, its source on the CPU, its tables."""

import ctypes
import shutil
import subprocess

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.kernels.copy_pages.copies import Copies, CopyFailed, Direction, Order
from shared.kernels.copy_pages.costs import CostTable, Line
from shared.kernels.copy_pages.cuda_copier import NUM_TABLES, CudaCopier
from shared.kernels.copy_pages.host_memory import view
from shared.kernels.copy_pages.pieces_kernel import SOURCE, THREADS, compiled
from shared.kernels.copy_pages.plan import KERNEL_ROW_BYTES, Always, Choice, Limits, Method, plan_copies
from shared.kernels.copy_pages.recording_driver import RecordingDriver

H2D = Direction.HOST_TO_DEVICE
KERNEL = Always(Choice(Method.KERNEL, 2))
STREAM, PIECE, PIECES = 77, 4096, 9

# -- when a kernel may copy ---------------------------------------------------------------------------------------

apart = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), min_size=2, max_size=12)


@settings(max_examples=200, deadline=None)
@given(apart, st.sampled_from([1, 8, 16]), st.integers(1, 12), st.integers(1, 5))
def test_a_kernel_gets_aligned_rows_of_bounded_size_and_number_or_nothing(parts, unit, most_rows, lanes):
    """Units of 1 and 8 bytes make addresses that no vector of 16 bytes may have."""
    sizes = [unit * count * (1024 if unit == 16 else 1) for count, _ in parts]
    targets = 1 << 30
    places = []
    for size, (_, gap) in zip(sizes, parts, strict=True):
        places.append(targets + unit * (1 + gap))
        targets = places[-1] + size
    copies = Copies.of([place - (1 << 29) for place in places], places, sizes)
    limits = Limits(max_kernel_rows=most_rows, max_run_bytes=64 << 10)
    plan = plan_copies(copies, H2D, Always(Choice(Method.KERNEL, lanes)), limits=limits, kernels=True)
    assert plan.runs.num_bytes == sum(sizes)
    columns = np.concatenate([plan.runs.sources, plan.runs.targets, plan.runs.sizes])
    if plan.choice.method is Method.KERNEL:
        assert not (columns % 16).any()
        assert len(plan.runs) <= most_rows
        assert all(0 < size <= KERNEL_ROW_BYTES for size in plan.runs.sizes.tolist())
        assert plan.choice.lanes <= limits.max_lanes
        assert plan.calls == ()
    else:
        rows = sum(-(-size // KERNEL_ROW_BYTES) for size in plan.runs.sizes.tolist())
        assert len(plan.runs) < 2 or rows > most_rows or (columns % 16).any(), "nothing stood against it"


def pieces(memory: ctypes.Array, count: int = PIECES, first: int = 0) -> Copies:
    """Of the lower half into the upper one, in another order."""
    base = -(-ctypes.addressof(memory) // 16) * 16
    order = (np.arange(count) * 2 + 1) % count
    upper = base + PIECES * PIECE
    return Copies.of(base + (first + np.arange(count)) * PIECE, upper + (first + order) * PIECE, PIECE)


def memory_of(seed: int) -> ctypes.Array:
    made = ctypes.create_string_buffer(2 * PIECES * PIECE + 16)
    data = np.random.default_rng(seed).integers(1, 255, PIECES * PIECE + 16, np.uint8)
    ctypes.memmove(made, data.tobytes(), data.size)
    return made


def arrived(copies: Copies) -> bool:
    return all(ctypes.string_at(a, size) == ctypes.string_at(b, size) for a, b, size in copies.rows())


def test_nothing_is_copied_by_a_kernel_unless_the_caller_says_that_it_may():
    driver = RecordingDriver()
    copier = CudaCopier(driver, chooser=KERNEL)
    memory = memory_of(1)
    copies = pieces(memory)
    assert copier.submit(copies, H2D, stream=STREAM).plan.choice.method is Method.BATCH
    during = copier.submit(copies, H2D, stream=STREAM, order=Order.DURING_CALL, kernels=True)
    assert during.plan.choice.method is Method.BATCH, "a kernel reads when its turn comes"
    assert copier.submit(copies, H2D, stream=STREAM, kernels=True).plan.choice.method is Method.KERNEL
    none = CudaCopier(RecordingDriver(has_kernel=False), chooser=KERNEL)
    assert none.submit(copies, H2D, stream=STREAM, kernels=True).plan.choice.method is Method.BATCH
    assert arrived(copies)


# -- tables -------------------------------------------------------------------------------------------------------


def test_a_table_is_used_again_only_when_the_kernel_that_reads_it_is_done():
    driver = RecordingDriver(eager=False)
    copier = CudaCopier(driver, chooser=KERNEL)
    memories = [memory_of(seed) for seed in range(NUM_TABLES + 2)]
    sets = [pieces(memory) for memory in memories]
    tickets = [copier.submit(copies, H2D, stream=STREAM, kernels=True) for copies in sets]
    methods = [ticket.plan.choice.method for ticket in tickets]
    assert methods == [Method.KERNEL] * NUM_TABLES + [Method.BATCH] * 2, "nobody waits for a table"
    driver.run()
    assert all(ticket.done() for ticket in tickets)
    assert all(map(arrived, sets))
    assert copier.submit(sets[0], H2D, stream=STREAM, kernels=True).plan.choice.method is Method.KERNEL
    driver.run()
    copier.close()
    assert driver.memory == {}
    assert driver.events == {}


def test_a_launch_that_fails_gives_its_table_back_and_one_that_may_run_does_not():
    driver = RecordingDriver()
    copier = CudaCopier(driver, chooser=KERNEL)
    copies = pieces(memory := memory_of(1))
    for _ in range(NUM_TABLES + 1):
        driver.fail_at["copy_rows"] = 1
        with pytest.raises(CopyFailed) as failed:
            copier.submit(copies, H2D, stream=STREAM, kernels=True)
        assert not failed.value.running
    assert copier.submit(copies, H2D, stream=STREAM, kernels=True).plan.choice.method is Method.KERNEL
    for _ in range(NUM_TABLES):
        driver.fail_at["record"] = 1
        with pytest.raises(CopyFailed):
            copier.submit(copies, H2D, stream=STREAM, kernels=True)
    assert copier.submit(copies, H2D, stream=STREAM, kernels=True).plan.choice.method is Method.BATCH
    assert memory


@pytest.mark.parametrize("running", [False, True])
def test_closing_keeps_the_tables_only_if_a_kernel_may_still_read_one(running):
    driver = RecordingDriver()
    copier = CudaCopier(driver, chooser=KERNEL)
    memory = memory_of(1)
    driver.fail_at = {"record": 1}
    if running:
        driver.fail_at["passed"] = 3  # whether all has settled
    with pytest.raises(CopyFailed) as failed:
        copier.submit(pieces(memory), H2D, stream=STREAM, kernels=True)
    assert failed.value.running is running
    copier.close()
    assert bool(driver.memory) is running


# -- when it is worth it ------------------------------------------------------------------------------------------


def table(kernel_us: float) -> CostTable:
    lines = {
        (H2D, Method.BATCH, 1): Line(5.0, (4096, 1 << 20), (0.5, 20.0)),
        (H2D, Method.KERNEL, 1): Line(10.0, (4096, 1 << 20), (kernel_us, 20.0)),
    }
    return CostTable("test", lines)


@pytest.mark.parametrize(
    ("kernel_us", "want"), [(0.1, Method.KERNEL), (0.39, Method.KERNEL), (0.42, Method.BATCH)]
)
def test_a_kernel_is_chosen_where_it_gains_more_than_its_multiprocessors_are_worth(kernel_us, want):
    small = np.full(2000, 4096, np.uint64)
    assert table(kernel_us).choose(H2D, small, None, None, kernels=True).method is want
    assert table(kernel_us).choose(H2D, small, None, None).method is Method.BATCH


def test_a_caller_who_is_held_for_every_row_pays_for_it_twice():
    """4,096 descriptors of 0.4 us are 1.6 ms of an engine's step; the kernel's launch is no longer for more rows."""
    lines = {
        (H2D, Method.BATCH, 1): Line(5.0, (4096, 1 << 20), (0.7, 20.0), (0.4, 0.4)),
        (H2D, Method.KERNEL, 1): Line(10.0, (4096, 1 << 20), (0.72, 20.0), (0.03, 0.03)),
    }
    rows = np.full(4096, 32 << 10, np.uint64)
    assert CostTable("held", lines).choose(H2D, rows, None, None, kernels=True).method is Method.KERNEL
    unheld = {way: Line(line.fixed_us, line.sizes, line.each_us) for way, line in lines.items()}
    assert CostTable("not", unheld).choose(H2D, rows, None, None, kernels=True).method is Method.BATCH


# -- its source ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_source_compiles_and_asks_for_all_vectors_before_it_stores_one(arch):
    binary = compiled(arch)
    assert binary.cubin[:4] == b"\x7fELF"
    loads = [at for at in range(len(binary.ptx)) if binary.ptx.startswith("ld.global.cs.v4.u32", at)]
    first_store = binary.ptx.index("st.global.cs.v4.u32")
    assert len(loads) == 8
    assert max(loads) < first_store
    assert "bar.sync" not in binary.ptx, "no thread waits for another one"


SHIM = """
struct uint4 { unsigned x, y, z, w; };
struct Index { unsigned x; };
static Index threadIdx, blockIdx, blockDim, gridDim;
#define __device__
#define __global__
#define __launch_bounds__(n)
#include "%s"
extern "C" void run(const u64* table, unsigned rows, unsigned ctas, unsigned threads) {
  gridDim.x = ctas, blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < ctas; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) copy_pieces(table, rows);
}
"""


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """The kernel on the CPU, a thread after the other."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "shim.cpp").write_text(SHIM % SOURCE)
    command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-w", "shim.cpp", "-o", "shim.so"]
    subprocess.run(command, cwd=folder, check=True, timeout=120)
    return ctypes.CDLL(str(folder / "shim.so")).run


@pytest.mark.parametrize("ctas", [8, 16])
@pytest.mark.parametrize("rows", [1, 7, 128, 129, 700])
def test_every_byte_of_every_row_arrives_and_no_other_changes(emulated, rows, ctas):
    random = np.random.default_rng(rows)
    sizes = 16 * random.choice([0, 1, 31, 32, 33, 255, 256, 257, 1024], rows)
    gaps = 16 * random.choice([0, 1, 3], rows)
    ends = np.cumsum(sizes + gaps)
    half = int(ends[-1]) + 16
    memory = np.zeros(2 * half + 16, np.uint8)
    base = -(-int(memory.ctypes.data) // 16) * 16
    view(base, half)[:] = random.integers(1, 255, half, np.uint8)
    sources = base + (ends - sizes)[random.permutation(rows)] // 16 * 16
    sources = np.minimum(sources, base + half - sizes)
    targets = base + half + ends - sizes
    want = view(base, 2 * half).copy()
    for source, target, size in zip(sources - base, targets - base, sizes, strict=True):
        want[target : target + size] = want[source : source + size]
    columns = np.concatenate([sources, targets, sizes]).astype(np.uint64)
    emulated(ctypes.c_void_p(columns.ctypes.data), rows, ctas, THREADS)
    assert np.array_equal(view(base, 2 * half), want)
