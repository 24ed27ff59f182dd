"""What pages of GPU memory cost: making, mapping, importing, giving back, mapping in the background.

    python -m loadtest.bench_vmm [--gib 32] [--pool-gib 100] [--json FILE]      one GPU, under 3 minutes; a table last

Needs CUDA's driver and cuda.bindings (numba for the native mapper); no torch. Beside each figure stands the ceiling: a
plain cuMemAlloc and cuMemFree of the same bytes. Run it on an otherwise idle GPU.
"""

import argparse
import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from loadtest import mapper_stall
from loadtest.vmm_children import num_fds
from loadtest.vmm_link import Child, lend
from shared.errors import ClusterError
from shared.vmm.cuda_driver import CudaVmmDriver
from shared.vmm.cuda_pages import CudaPages
from shared.vmm.errors import VmmUnavailable
from shared.vmm.geometry import KvShape
from shared.vmm.interface import map_identity
from shared.vmm.kv_layouts import token_major
from shared.vmm.kv_slots import KvSlots

MIB, GIB = 1 << 20, 1 << 30
PAGE_MIB = (2, 8, 32)


class Bench:
    """Sections add lines to a table and figures to a dictionary; one that fails says so and the next one runs."""

    def __init__(self, gib: int, pool_gib: int) -> None:
        self.driver = CudaVmmDriver(0)
        free, total = self.driver.memory_info()
        room = (free - 4 * GIB) // GIB
        self.gib, self.pool_gib = max(1, min(gib, room)), max(1, min(pool_gib, room))
        self.lines = [f"GPU memory {total / GIB:.0f} GiB, {free / GIB:.1f} free"]
        self.figures: dict[str, float] = {}

    def run(self) -> None:
        """Everything."""
        for section in (
            self.contexts, self.plain, *(lambda size=size: self.pages(size) for size in PAGE_MIB),
            *(lambda size=size: self.given_back(size) for size in PAGE_MIB),
            self.given_back_by_importers, self.pool, self.under_load, self.background, self.slots,
        ):  # fmt: skip
            try:
                section()
            except (ClusterError, OSError, RuntimeError) as error:
                traceback.print_exc()
                self.lines.append(f"FAILED: {type(error).__name__}: {error}")

    def say(self, text: str, **figures: float) -> None:
        """One line of the table, and its figures by name."""
        self.lines.append(text)
        self.figures |= figures

    def contexts(self) -> None:
        """What a process that owns pages costs, with and without a context."""
        free = self.driver.memory_info()[0]
        for kind in ("watcher", "bare"):
            child = Child(kind)
            begin = time.perf_counter()
            try:
                if kind == "watcher":
                    child.call("mark")
                    what, used = "a CUDA context", free - self.driver.memory_info()[0]
                else:
                    child.call("create", 2 * MIB)
                    what, used = "2 MiB without a context", free - self.driver.memory_info()[0]
                took = time.perf_counter() - begin
                self.say(f"{what}: {used / MIB:.0f} MiB, {took:.2f} s", **{f"{kind}_mib": used / MIB})
            except ClusterError as error:
                self.say(f"{kind}: {error.message}")
            finally:
                child.close()

    def plain(self) -> None:
        """The ceiling: one cuMemAlloc of the same bytes."""
        driver: Any = importlib.import_module("cuda.bindings.driver")
        made, freed = [], []
        for _ in range(3):
            begin = time.perf_counter()
            status, address = driver.cuMemAlloc(self.gib * GIB)
            made.append(time.perf_counter() - begin)
            if int(status) != 0:
                raise ClusterError(f"cuMemAlloc: {status.name}")
            begin = time.perf_counter()
            driver.cuMemFree(address)
            freed.append(time.perf_counter() - begin)
        self.say(
            f"cuMemAlloc of {self.gib} GiB: {median(made) * 1e3:.1f} ms; cuMemFree {median(freed) * 1e3:.1f} ms "
            f"= {self.gib / median(freed):.0f} GiB/s (the ceiling)",
            plain_alloc_ms=median(made) * 1e3,
            plain_free_gib_per_s=self.gib / median(freed),
        )

    def pages(self, page_mib: int) -> None:
        """Per page: create, map, one access call for all, unmap in one call, release."""
        count = self.gib * GIB // (page_mib * MIB)
        steps: dict[str, float] = {}

        def timed(name: str, work: Callable[[], Any]) -> Any:
            begin = time.perf_counter()
            result = work()
            steps[name] = time.perf_counter() - begin
            return result

        pages = timed("create", lambda: CudaPages(self.driver, count, page_mib * MIB))
        window = pages.window(count)
        ops = window.plan_map(0, range(count))
        timed("map", lambda: window.apply(ops[:-1]))
        timed("access", lambda: window.apply(ops[-1:]))
        timed("unmap", lambda: window.unmap(0, count))
        timed("release", pages.close)
        window.close()
        each = ", ".join(f"{name} {took / count * 1e6:.1f}" for name, took in steps.items())
        self.say(
            f"{page_mib:>2} MiB pages, us each: {each}; {self.gib} GiB made and mapped in "
            f"{steps['create'] + steps['map'] + steps['access']:.3f} s",
            **{f"{name}_{page_mib}mib_us": took / count * 1e6 for name, took in steps.items()},
        )

    def given_back(self, page_mib: int) -> None:
        """Until another process sees the memory free."""
        count = self.gib * GIB // (page_mib * MIB)
        pages = CudaPages(self.driver, count, page_mib * MIB)
        window = pages.window(count)
        window.map(0, 0, count)
        watcher = Child("watcher")
        watcher.call("mark")
        watcher.send("wait", self.gib * GIB - GIB // 64, 60_000)
        time.sleep(0.05)  # it polls by now
        begin = time.monotonic()
        window.unmap(0, count)
        pages.close()
        own = time.monotonic() - begin
        seen = watcher.answer()
        watcher.close()
        window.close()
        took = seen["at"] - begin
        self.say(
            f"{page_mib:>2} MiB pages: {self.gib} GiB given back: {self.gib / own:.0f} GiB/s by our clock, "
            f"{self.gib / took:.0f} GiB/s seen by another process",
            **{f"release_{page_mib}mib_gib_per_s": self.gib / took},
        )

    def given_back_by_importers(self) -> None:
        """The same while another process has them mapped, which has to let go first."""
        size, count = 8 * MIB, self.gib * GIB // (8 * MIB)
        pages = CudaPages(self.driver, count, size)
        window = pages.window(count)
        window.map(0, 0, count)
        importer, watcher = Child("importer"), Child("watcher")
        lend(importer, pages)
        watcher.call("mark")
        watcher.send("wait", self.gib * GIB - GIB // 64, 60_000)
        time.sleep(0.05)
        begin = time.monotonic()
        importer.send("drop", 0, count)
        window.unmap(0, count)
        pages.close()
        let_go = importer.answer()["at"] - begin
        took = watcher.answer()["at"] - begin
        for child in (importer, watcher):
            child.close()
        window.close()
        self.say(
            f" 8 MiB pages with an importer attached: {self.gib / took:.0f} GiB/s seen by a third process "
            f"(the importer let go after {let_go * 1e3:.0f} ms)",
            release_with_importer_gib_per_s=self.gib / took,
        )

    def pool(self) -> None:
        """Link-up with a whole pool: time and descriptors."""
        before = num_fds()
        pages = CudaPages(self.driver, self.pool_gib * GIB // (8 * MIB), 8 * MIB)
        importer = Child("importer")
        begin = time.perf_counter()
        export_s, said = lend(importer, pages)
        took = time.perf_counter() - begin
        importer.close()
        self.say(
            f"import of {self.pool_gib} GiB as {pages.num_pages} pages of 8 MiB: {took:.2f} s (export {export_s:.2f}, "
            f"import {said['import_s']:.2f}, map {said['map_s']:.2f}); descriptors after it: owner +"
            f"{num_fds() - before - 1}, importer {said['fds']} (at most {said['most_fds']})",
            attach_s=took,
            attach_fds=said["fds"],
        )
        pages.close()

    def under_load(self) -> None:
        """Single calls while the GPU is busy, and whether they wait for it."""
        driver: Any = importlib.import_module("cuda.bindings.driver")
        pages = CudaPages(self.driver, 64, 8 * MIB)
        window, busy = pages.window(64), CudaPages(self.driver, 1, GIB)
        target = busy.window(1)
        target.map(0, 0)
        took: dict[str, list[float]] = {"map+access": [], "unmap": []}
        for _ in range(1000):  # about 0.4 s of work
            driver.cuMemsetD32Async(target.address, 7, GIB // 4, 0)
        for page in range(64):
            begin = time.perf_counter()
            window.map(page, page)
            took["map+access"].append(time.perf_counter() - begin)
        for page in range(64):
            begin = time.perf_counter()
            window.unmap(page)
            took["unmap"].append(time.perf_counter() - begin)
        begin = time.perf_counter()
        driver.cuStreamSynchronize(0)
        left = time.perf_counter() - begin
        each = ", ".join(
            f"{name} {median(us) * 1e6:.0f} us (worst {max(us) * 1e6:.0f})" for name, us in took.items()
        )
        self.say(f"while the GPU works: {each}; {left * 1e3:.0f} ms of its work were left after them")
        for one in (window, target, pages, busy):
            one.close()

    def background(self) -> None:
        """Main-thread stall per map with the mapper threads."""
        pages = CudaPages(self.driver, mapper_stall.MAPS, 2 * MIB)
        window = pages.window(mapper_stall.MAPS)
        self.lines += mapper_stall.table(window, rounds=5)
        window.close()
        pages.close()

    def slots(self) -> None:
        """Decode with request slots: calls on the critical path, and step()'s time in Python."""
        layout = token_major(KvShape(32, 8, 128), num_slots=64, max_tokens=8192)
        pages = CudaPages(self.driver, min(1024, self.gib * 128), layout.geometry.page_bytes)
        slots = KvSlots(layout, pages)
        lens = [0] * 64
        for _ in range(64):
            reqid = slots.alloc_reqid((), 512)
            if reqid is not None:
                lens[reqid] = 500 + reqid
        begin = time.perf_counter()
        slots.step(lens)
        first = time.perf_counter() - begin
        slots.drain()
        inline, times = slots.counters.inline_ops, []
        for _ in range(256):
            lens = [n + 1 for n in lens]
            begin = time.perf_counter()
            slots.step(lens)
            times.append(time.perf_counter() - begin)
            time.sleep(0.005)  # the model's turn
        counters = slots.counters
        self.say(
            f"64 request slots: first step maps {inline} ops in {first * 1e3:.1f} ms; 256 decode steps: step() median "
            f"{median(times) * 1e6:.0f} us, worst {max(times) * 1e6:.0f}; {counters.background_ops} ops in the "
            f"background, {counters.inline_ops - inline} on the critical path, {counters.waits} waits "
            f"({counters.waited_s * 1e3:.1f} ms)"
        )
        slots.close()
        pages.close()
        window = (null := CudaPages(self.driver, 2, 2 * MIB)).window(3)
        map_identity(window, 2)
        window.close()
        null.close()


def main(argv: list[str]) -> int:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=int, default=32)
    parser.add_argument("--pool-gib", type=int, default=100)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args(argv)
    try:
        bench = Bench(arguments.gib, arguments.pool_gib)
    except VmmUnavailable as error:
        print(f"not measured: {error.message}")
        return 2
    bench.run()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(bench.figures, indent=1) + "\n")
    print("\n".join(bench.lines))
    return int(any(line.startswith("FAILED") for line in bench.lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
