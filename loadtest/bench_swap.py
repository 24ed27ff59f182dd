"""Swapping KV between GPU and host: pages, 32 KiB pieces and the shapes of vLLM PR 38460, in both directions.

    python -m loadtest.bench_swap [--quick] [--no-vllm]      writes loadtest/results/h200-swap.json

Needs a GPU with CUDA 13's driver, numpy and cuda.bindings; under 90 s. Every figure is a wall time from the call to
the end of the copy, planning and checking included, beside one plain copy of the same bytes in the same run. vLLM's
own `swap_blocks_batch` is measured beside ours where vLLM for CUDA is installed ("not here" otherwise). The host's
memory is pinned by cuMemHostAlloc, or a memfd that cuMemHostRegister page-locked, as the mempool's host tier is.
"""

import argparse
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from loadtest.registry import RESULTS
from loadtest.results import Metrics, Samples, write_result
from loadtest.swap_rig import (
    MIB,
    SHAPES,
    Case,
    Rig,
    SharedFile,
    VllmSwap,
    blocks_of,
    pages_of,
    run_cases,
)
from shared.kernels.copy_pages.calibrate import CAPS, measure
from shared.kernels.copy_pages.copies import Copies, CopyUnavailable, Direction, Order
from shared.kernels.copy_pages.driver import CudaDriver
from shared.kernels.copy_pages.plan import Always, Choice, Method

NAME = "h200-swap"
CLAIM = (
    "On one H200 a swap of pages, either way, runs at >= 0.97 of one plain copy; 4,096 pieces of 32 KiB go at >= 30 "
    "GB/s and no slower than vLLM 0.26's swap_blocks_batch; a page-locked memfd is as fast as cuMemHostAlloc."
)
WAYS = (Direction.DEVICE_TO_HOST, Direction.HOST_TO_DEVICE)
ROUNDS = 15
SET_BYTES = 256 * MIB
PAGES = (2 * MIB, 8 * MIB)
PIECE = 32 << 10
PIECES = 4096
PAGEABLE_BYTES = 64 * MIB
BUDGET_S = 75.0  # no section begins later
LOOP, BATCH = Always(Choice(Method.LOOP)), Always(Choice(Method.BATCH))
KERNELS = {
    f"kernel x{lanes}" if lanes > 1 else "kernel": Always(Choice(Method.KERNEL, lanes)) for lanes in (1, 2, 4)
}
SHOWN = ("loop", "batch", *KERNELS, "auto", "pages", "vllm")
LANES = {f"batch x{lanes}": Always(Choice(Method.BATCH, lanes)) for lanes in (2, 4)}

Sample = dict[str, Any]


def metrics_from_samples(samples: Samples) -> Metrics:
    """The worst of both directions (and page sizes, shapes) each time; rates and ratios of median times.

    `batch_32k` is the copier as it is used, with the way that its cost table chose; `one_lane` a single batch.
    """
    us = {
        (row["section"], row["set"], row["direction"], row["case"]): median(row["wall_us"]) for row in samples
    }
    size = {(row["section"], row["set"]): row["bytes"] for row in samples}

    def worst_rate(section: str, case: str) -> float:
        rates = [
            size[key[:2]] / value / 1e3 for key, value in us.items() if (key[0], key[3]) == (section, case)
        ]
        return min(rates, default=0.0)

    def worst_ratio(section: str, over: str, under: str) -> float:
        pairs = [
            us[(*key[:3], over)] / value
            for key, value in us.items()
            if (key[0], key[3]) == (section, under) and (*key[:3], over) in us
        ]
        return min(pairs, default=0.0)

    found = {
        "page_share_of_copy_ratio": worst_ratio("pages", "plain copy", "auto"),
        "page_gb_per_s": worst_rate("pages", "auto"),
        "copy_gb_per_s": worst_rate("pages", "plain copy"),
        "batch_32k_gb_per_s": worst_rate("pieces", "auto"),
        "batch_32k_one_lane_gb_per_s": worst_rate("pieces", "batch"),
        "loop_32k_gb_per_s": worst_rate("pieces", "loop"),
        "vllm_32k_gb_per_s": worst_rate("pieces", "vllm"),
        "batch_32k_of_vllm_ratio": worst_ratio("pieces", "vllm", "auto"),
        "memfd_share_of_pinned_ratio": worst_ratio("memfd", "pinned", "memfd"),
        "shapes_of_loop_ratio": worst_ratio("shapes", "loop", "auto"),
        "shapes_of_vllm_ratio": worst_ratio("shapes", "vllm", "auto"),
        "shapes_as_pages_of_vllm_ratio": worst_ratio("shapes", "vllm", "pages"),
    }
    return {key: value for key, value in found.items() if value > 0}


class Bench:
    """Sections append samples; one that fails is reported and the next one runs."""

    def __init__(self, rig: Rig, vllm: VllmSwap | None, rounds: int) -> None:
        self.rig = rig
        self.vllm = vllm
        self.rounds = rounds
        self.samples: list[Sample] = []

    def run(
        self,
        section: str,
        name: str,
        direction: Direction,
        copies: Copies,
        cases: dict[str, Case],
        *,
        num_bytes: int = 0,
        chosen: str = "",
    ) -> None:
        """Measure cases that all move the same bytes; the last set's targets are compared with their sources."""
        for case, times in run_cases(cases, self.rounds).items():
            row = {"section": section, "set": name, "direction": direction.value, "case": case}
            row |= {"bytes": num_bytes or copies.num_bytes, "copies": len(copies), **times}
            if case == "auto":
                row["chosen"] = chosen or self.rig.chosen(copies, direction)
            self.samples.append(row)
        self.rig.check(copies, direction)

    def pages(self) -> None:
        """Scattered pages against one plain copy of as many bytes."""
        rig = self.rig
        for direction in WAYS:
            ends = (rig.device, rig.host) if direction is Direction.DEVICE_TO_HOST else (rig.host, rig.device)
            one = rig.plain(Copies.of([ends[0]], [ends[1]], SET_BYTES))
            for size in PAGES:
                copies = pages_of(size, SET_BYTES // size, rig.device, rig.host, direction)
                cases = {
                    "plain copy": one,
                    "auto": rig.ours(copies, direction),
                    "batch": rig.ours(copies, direction, BATCH),
                    "loop": rig.ours(copies, direction, LOOP),
                }
                self.run("pages", f"{size // MIB} MiB", direction, copies, cases)

    def pieces(self) -> None:
        """4,096 pieces of 32 KiB: every way, vLLM's own, and the same bytes as neighbours that merge."""
        rig = self.rig
        for direction in WAYS:
            copies = pages_of(PIECE, PIECES, rig.device, rig.host, direction)
            offsets = [number * PIECE for number in range(PIECES)]
            to_host = direction is Direction.DEVICE_TO_HOST
            bases = (rig.device, rig.host) if to_host else (rig.host, rig.device)
            near = Copies.of(
                [bases[0] + each for each in offsets], [bases[1] + each for each in offsets], PIECE
            )
            cases = {
                "loop": rig.ours(copies, direction, LOOP),
                "batch": rig.ours(copies, direction, BATCH),
                **{f"batch by {cap}": rig.ours(copies, direction, BATCH, cap=cap) for cap in CAPS},
                "batch, any order": rig.ours(copies, direction, BATCH, order=Order.ANY),
                **{name: rig.ours(copies, direction, way) for name, way in LANES.items()},
                **{name: rig.ours(copies, direction, way, kernels=True) for name, way in KERNELS.items()},
                "neighbours, apart": rig.ours(near, direction, BATCH, merging=False),
                "neighbours, merged": rig.ours(near, direction),
            }
            if self.vllm is not None:
                cases["vllm"] = self.vllm.case(rig, copies, direction)
            cases["auto"] = rig.ours(copies, direction)
            self.run("pieces", "4096 x 32 KiB", direction, copies, cases)

    def shapes(self) -> None:
        """The seven shapes of PR 38460: on its discrete tensors, and the same blocks as pages."""
        rig = self.rig
        for shape in SHAPES:
            for direction in WAYS:
                copies = blocks_of(shape, rig.device, rig.host, direction)
                pages = pages_of(shape.page_bytes, shape.blocks, rig.device, rig.host, direction)
                cases = {
                    "loop": rig.ours(copies, direction, LOOP),
                    "batch": rig.ours(copies, direction, BATCH),
                    **{name: rig.ours(copies, direction, way, kernels=True) for name, way in KERNELS.items()},
                    "pages": rig.ours(pages, direction),
                }
                if self.vllm is not None:
                    cases["vllm"] = self.vllm.case(rig, copies, direction)
                cases["auto"] = rig.ours(copies, direction)
                self.run("shapes", shape.name, direction, copies, cases)

    def memfd(self) -> None:
        """A page-locked memfd against pinned memory: one plain copy, and pages of 2 MiB."""
        rig = self.rig
        file = SharedFile(rig.driver, 2 * SET_BYTES, locked=True)
        try:
            for direction in WAYS:
                self._same_on(file, direction)
        finally:
            file.close()

    def _same_on(self, file: SharedFile, direction: Direction) -> None:
        rig = self.rig
        to_host = direction is Direction.DEVICE_TO_HOST
        plain, pages, last = {}, {}, Copies.of([], [], [])
        for name, host in (("pinned", rig.host), ("memfd", file.address)):
            bases = (rig.device, host) if to_host else (host, rig.device)
            plain[name] = rig.plain(Copies.of([bases[0]], [bases[1]], SET_BYTES))
            last = pages_of(PAGES[0], SET_BYTES // PAGES[0], rig.device, host, direction)
            pages[name] = rig.ours(last, direction)
        self.run("memfd", "plain copy", direction, Copies.of([bases[0]], [bases[1]], SET_BYTES), plain)
        self.run("memfd", "2 MiB", direction, last, pages)

    def pageable(self) -> None:
        """A memfd that is not page-locked: the driver's own bounce against our pinned slots."""
        rig = self.rig
        file = SharedFile(rig.driver, 2 * PAGEABLE_BYTES, locked=False)
        staged = Always(Choice(Method.STAGED))
        try:
            for direction in WAYS:
                copies = pages_of(PAGES[0], PAGEABLE_BYTES // PAGES[0], rig.device, file.address, direction)
                cases = {
                    "driver": rig.ours(copies, direction, LOOP),
                    "staged": rig.ours(copies, direction, staged, staging=True),
                }
                self.run("pageable", "2 MiB", direction, copies, cases)
        finally:
            file.close()


def show(samples: Samples) -> None:
    """The short table: one line a set, GB/s of each case."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for row in samples:
        rate = row["bytes"] / median(row["wall_us"]) / 1e3
        way = f" ({row['chosen']})" if "chosen" in row else ""
        head = (row["section"], row["set"], "D2H" if row["direction"] == WAYS[0] else "H2D")
        lines.setdefault(head, []).append(f"{row['case']}{way} {rate:.1f}")
    print("\nGB/s:")
    for (section, name, direction), cells in lines.items():
        print(f"  {section:8} {name:14} {direction}  " + ", ".join(cells))


def show_shapes(samples: Samples) -> None:
    """PR 38460's table with our times beside its own, us."""
    us = {
        (row["set"], row["direction"], row["case"]): median(row["wall_us"])
        for row in samples
        if row["section"] == "shapes"
    }
    if not us:
        return
    print("\nPR 38460's shapes, us (its columns: 8xH100, its own handler)")
    print(f"  {'':14}{'PR loop':>8}{'PR batch':>9}   " + "".join(f"{case:>10}" for case in SHOWN))
    for shape in SHAPES:
        for direction in WAYS:
            cells = [us.get((shape.name, direction.value, case)) for case in SHOWN]
            ours = "".join(f"{cell:10.0f}" if cell else f"{'-':>10}" for cell in cells)
            to = "D2H" if direction is WAYS[0] else "H2D"
            print(f"  {shape.name:14}{shape.pr_baseline_us:8}{shape.pr_batched_us:9}   {ours} {to}")


def attempt(name: str, work: Callable[[], Any], began_s: float) -> tuple[Any, bool]:
    """(what `work` returned, whether it went well); a failure is printed, and the next section still runs."""
    if time.monotonic() - began_s > BUDGET_S:
        print(f"{name}: skipped, {BUDGET_S:.0f} s are over")
        return None, False
    begin_s = time.monotonic()
    try:
        done = work()
    except Exception as error:  # noqa: BLE001 - one section's failure must not hide the others' figures
        print(f"{name}: FAILED: {error!r}")
        traceback.print_exc()
        return None, False
    print(f"{name}: {time.monotonic() - begin_s:.1f} s", flush=True)
    return done, True


def find_vllm() -> VllmSwap | None:
    """None, and a line that says why, where vLLM for CUDA is not installed."""
    try:
        return VllmSwap()
    except ImportError as error:
        print(f"vLLM's swap_blocks_batch: not here ({error})")
        return None


def main(argv: Sequence[str]) -> int:
    """Measure and write the result file; exit status 1 when a section failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three rounds; writes no result file")
    parser.add_argument("--no-vllm", action="store_true", help="leave vLLM's own call out")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument(
        "--commit", default="", help="commit of these files, on a machine without the repository"
    )
    options = parser.parse_args(argv)
    began_s = time.monotonic()
    try:
        driver = CudaDriver(options.device)
    except CopyUnavailable as error:
        print(f"nothing to measure here: {error.message}")
        return 2
    num_bytes = max(2 * SET_BYTES, 2 * max(shape.num_bytes for shape in SHAPES))
    vllm, vllm_ok = (None, True) if options.no_vllm else attempt("vLLM", find_vllm, began_s)
    costs, costs_ok = attempt("costs", lambda: measure(driver), began_s)
    rig, rig_ok = attempt("memory", lambda: Rig(driver, costs, num_bytes), began_s)
    if rig is None:
        return 1
    bench = Bench(rig, vllm, 3 if options.quick else ROUNDS)
    sections = [bench.pages, bench.pieces, bench.memfd, bench.shapes, bench.pageable]
    well = [attempt(section.__name__, section, began_s)[1] for section in sections]
    well += [vllm_ok, costs_ok, rig_ok, attempt("close", rig.close, began_s)[1]]
    print(costs.render() if costs else "no cost table")
    metrics = metrics_from_samples(bench.samples)
    show_shapes(bench.samples)
    show(bench.samples)
    settings = {"rounds": bench.rounds, "set_bytes": SET_BYTES, "key": driver.key, "vllm": vllm is not None}
    if costs:
        settings["costs"] = costs.render().splitlines()
    for key, value in sorted(metrics.items()):
        print(f"{key:32} {value:10.3f}")
    if not options.quick and metrics:
        command = shlex.join(["python", "-m", "loadtest.bench_swap", *argv])
        path = write_result(
            NAME,
            claim=CLAIM,
            command=command,
            settings=settings,
            metrics=metrics,
            samples=bench.samples,
            folder=options.out,
            commit=options.commit,
        )
        print(f"wrote {path}")
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
