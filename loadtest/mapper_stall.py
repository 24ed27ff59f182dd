"""How much a Python thread is held up while 1,000 pages are mapped in the background (shared/vmm/mapper.py).

    python -m loadtest.mapper_stall        host memory, under 20 s; bench_vmm.py does the same on a GPU

The main thread counts in small pieces of some 20 us of Python, as an engine's scheduler would. "held up" is its time
for the same pieces with mapping going on, less without, per map, submission included; "worst gap" is the longest piece.
"maps done meanwhile": a thread that needs the GIL gets little of it while another is busy, and is late.
"""

import sys
import time
from statistics import median
from typing import Any

from shared.vmm.interface import PageWindow
from shared.vmm.mapper import Mapper, NativeMapper, ThreadMapper
from shared.vmm.memfd_pages import MemfdPages

MAPS = 1000
PIECES = 4000
HOST_PAGE_BYTES = 2 << 20


def pieces(count: int) -> tuple[float, float]:
    """(seconds in all, seconds of the longest piece)."""
    worst, begin = 0.0, time.perf_counter()
    last = begin
    for _ in range(count):
        total = 0
        for i in range(400):
            total += i
        now = time.perf_counter()
        worst = max(worst, now - last)
        last = now
    return last - begin, worst


def measure(
    window: PageWindow, kind: type[NativeMapper] | type[ThreadMapper] | None, rounds: int = 15
) -> dict[str, Any]:
    """Map MAPS pages, one op each, in the background (kind None: in this thread), with the main thread at work.

    Returns: medians: held_up_us per map, worst_gap_us.
    """
    mapper: Mapper | None = kind(window) if kind is not None else None
    held, gaps, base_gaps, done = [], [], [], []
    order = list(range(MAPS - 1, -1, -1))  # no two continue each other: one op, one call a page
    for _ in range(rounds):
        alone, gap = pieces(PIECES)
        base_gaps.append(gap)
        ops = window.plan_map(0, order)
        begin = time.perf_counter()
        if mapper is None:
            window.apply(ops)
            held.append(time.perf_counter() - begin)
            gaps.append(held[-1])
            done.append(MAPS)
        else:
            ticket = mapper.submit(ops)
            submitted = time.perf_counter() - begin
            before = mapper.done
            with_maps, gap = pieces(PIECES)
            done.append(mapper.done - before)
            mapper.wait(ticket)
            held.append(submitted + with_maps - alone)
            gaps.append(max(gap, submitted))
        window.apply(window.plan_unmap(0, MAPS))
    if mapper is not None:
        mapper.close()
    return {
        "held_up_us": median(held) / MAPS * 1e6,
        "worst_gap_us": median(gaps) * 1e6,
        "idle_gap_us": median(base_gaps) * 1e6,
        "done": median(done),
    }


def table(window: PageWindow, rounds: int = 15) -> list[str]:
    """Lines of a short table."""
    lines = ["way                held up us/map   worst gap us (without)   maps done meanwhile"]
    for name, kind in (
        ("in the thread", None),
        ("Python thread", ThreadMapper),
        ("native thread", NativeMapper),
    ):
        got = measure(window, kind, rounds)
        lines.append(
            f"{name:<18} {got['held_up_us']:14.2f} {got['worst_gap_us']:14.0f} ({got['idle_gap_us']:.0f})"
            f" {got['done']:20.0f}"
        )
    return lines


def main() -> int:
    """On host memory."""
    pages = MemfdPages(MAPS, HOST_PAGE_BYTES)
    window = pages.window(MAPS)
    print("\n".join(table(window)))
    window.close()
    pages.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
