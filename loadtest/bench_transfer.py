"""Pages from one H200 to another, by every path, beside a plain copy of the same bytes.

    python -m loadtest.bench_transfer [--quick] [--pool-gib 100]   writes loadtest/results/h200x2-transfer.json

Needs two GPUs that reach each other; torch for NCCL and nixl-cu13 for NIXL ("missing" without them). The owner process
holds pages on GPU 1, this process pulls them to GPU 0 through shared/transfer: a Link, deadlines, an epoch check of
every page after the copy. Every figure is wall time from pull() to the future's end. Under 150 s. A section that fails
says so and does not stop the others.
"""

import argparse
import mmap
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from loadtest.processes import free_port
from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, write_result
from loadtest.transfer_rig import (
    EPOCH,
    MIB,
    NUM,
    QUIET,
    SETS,
    ChannelOverWire,
    Gpu,
    OwnPages,
    Wire,
    count_fds,
    descriptors,
    nccl_round,
    region,
    scattered,
    start_owner,
    timed,
    torch_pair,
)
from shared.kernels.copy_pages.cuda_copier import CudaCopier
from shared.kernels.copy_pages.plan import Always, Choice, Method
from shared.transfer.config import TransferSettings, apply_ucx_environment
from shared.transfer.cuda_window import CudaWindow
from shared.transfer.epochs import sealed_check
from shared.transfer.imported import ImportedTransport
from shared.transfer.interface import Link, MappedPages, Peer, RegionKind
from shared.transfer.nixl import NixlTransport
from shared.transfer.page_stream import PageStream
from shared.transfer.pieces import Pieces

NAME = "h200x2-transfer"
CLAIM = (
    "Between two processes on two H200s, imported pages are pulled at >= 300 GB/s (64 pages of 2 and 8 MiB, epochs "
    "checked), at least twice as fast as NIXL on cudaMalloc slabs and many times as fast as NCCL call by call."
)
PIECE = 32 << 10
NUM_PIECES = 4096
TIMEOUT_MS = 20_000
BUDGET_S = 120.0  # no section begins later
LANES = (1, 2, 4)

Sample = dict[str, Any]


def metrics_from_samples(samples: Samples) -> Metrics:
    """Rates of median times. `page_pull`: the better number of lanes (the copier's cost table chooses it in use), then
    the worse of the page sizes. A section that did not run has no metric."""
    rates: dict[tuple[str, str, str], float] = {}
    found: Metrics = {}
    for row in samples:
        if row["section"] == "attach":
            found["attach_s"] = row["attach_s"]
            found["attach_fds_count"] = row["fds_sent"]
            found["puller_fds_count"] = row["fds_open"]
            found["cold_pull_gb_per_s"] = row["bytes"] / row["cold_us"] / 1e3
        else:
            rates[row["section"], row["set"], row["case"]] = row["bytes"] / median(row["wall_us"]) / 1e3

    def best(section: str, name: str, case: str = "") -> float | None:
        return max(
            (rate for key, rate in rates.items() if key[:2] == (section, name) and key[2].startswith(case)),
            default=None,
        )

    def put(metric: str, value: float | None) -> None:
        if value is not None:
            found[metric] = value

    sets = [rate for size in SETS if (rate := best("pages", f"{NUM} x {size // MIB} MiB")) is not None]
    put("page_pull_gb_per_s", min(sets, default=None))
    for size in SETS:
        put(f"page_pull_{size // MIB}mib_gb_per_s", best("pages", f"{NUM} x {size // MIB} MiB"))
    pieces, pages = f"{NUM_PIECES} x 32 KiB", f"{NUM} x 2 MiB"
    put("piece_pull_32k_gb_per_s", best("pages", pieces))
    put("copy_ceiling_gb_per_s", best("ceiling", "256 MiB"))
    put("nccl_grouped_gb_per_s", best("nccl", pages, "grouped"))
    put("nccl_per_block_gb_per_s", best("nccl", pieces, "per block"))
    put("nccl_per_page_gb_per_s", best("nccl", pages, "per block"))
    put("nixl_gb_per_s", best("nixl", pages))
    put("nixl_32k_gb_per_s", best("nixl", pieces))
    return found


class Puller:
    """The measuring process, on GPU 0."""

    def __init__(self, wire: Wire, repeats: int) -> None:
        self.wire = wire
        self.repeats = repeats
        self.gpu = Gpu(0)
        self.samples: list[Sample] = []
        self.imported: ImportedTransport | None = None
        self.table = memoryview(b"")

    def order(self, *words: Any) -> Any:
        """Have the owner do something; its answer."""
        self.wire.send("order", list(words))
        answer, _ = self.wire.receive("answer", 120.0)
        if isinstance(answer, dict) and "error" in answer:
            raise RuntimeError(f"owner: {answer['error']}")
        return answer

    def add(self, section: str, name: str, case: str, num_bytes: int, wall_us: list[float]) -> None:
        """Keep and print one row."""
        row = {"section": section, "set": name, "case": case, "bytes": num_bytes}
        self.samples.append({**row, "wall_us": [round(value, 1) for value in wall_us]})
        rate = num_bytes / median(wall_us) / 1e3
        print(f"  {section:8} {name:14} {case:16} {rate:8.1f} GB/s {median(wall_us):10.0f} us", flush=True)

    def ceiling(self) -> None:
        """One plain copy of 256 MiB between cudaMalloc memory of both GPUs, from this process."""
        gpu, size = self.gpu, 256 * MIB
        other = Gpu(1)
        far = other.slab(size)
        gpu.copy.make_current()
        near = gpu.slab(size)
        status, *_ = gpu.driver.cuCtxEnablePeerAccess(gpu.call("cuDevicePrimaryCtxRetain", 1), 0)
        if int(status) not in (0, 704):  # 704: enabled already
            raise RuntimeError(f"cuCtxEnablePeerAccess: {status.name}")
        stream = gpu.copy.create_stream()

        def copy() -> None:
            gpu.copy.copy(near, far, size, stream)
            gpu.call("cuStreamSynchronize", stream)

        self.add("ceiling", "256 MiB", "plain copy", size, timed(copy, self.repeats))
        gpu.copy.destroy_stream(stream)
        gpu.free_slabs()
        other.copy.make_current()
        other.free_slabs()
        gpu.copy.make_current()

    def import_pool(self, num_handles: int, handle_bytes: int) -> tuple[CudaWindow, bytes, int, float]:
        """The owner's pages, mapped here: window, description, descriptors that came, seconds."""
        begun_s = time.perf_counter()
        self.wire.send("order", ["export"])
        self.gpu.copy.make_current()
        window = CudaWindow(self.gpu.driver, 0, num_handles, handle_bytes)
        sent = 0
        for fds in descriptors(self.wire):
            sent += len(fds)
            window.add(fds)
        attach_s = time.perf_counter() - begun_s
        (description, table), _ = self.wire.receive("answer")
        table_fd = os.open(table, os.O_RDONLY)
        self.table = memoryview(mmap.mmap(table_fd, 0, prot=mmap.PROT_READ)).cast("Q")
        os.close(table_fd)
        return window, description, sent, attach_s

    def link(
        self, window: CudaWindow, description: bytes, own: OwnPages, lanes: int, page_bytes: int
    ) -> Link:
        """A link that copies in so many lanes."""
        self.gpu.copy.make_current()
        copier = CudaCopier(self.gpu.copy, chooser=Always(Choice(Method.BATCH, lanes)))
        copier.add_boundaries(window.boundaries())
        copier.add_boundaries(own.window.boundaries())
        stream = self.gpu.copy.create_stream()
        if self.imported is not None:
            self.imported.close()
        transport = self.imported = ImportedTransport(
            "puller",
            lambda source, target: (copier, stream),
            page_stream=PageStream(self.gpu.copy, lanes=lanes),
        )
        num_pages = own.num_handles * own.handle_bytes // page_bytes
        transport.register(
            region("mine", RegionKind.CUDA_PAGES, own.address, page_bytes, num_pages, self.gpu)
        )
        return transport.connect(Peer(description, mapped={"theirs": MappedPages(window.address, device=1)}))

    def pull_pages(self, link: Link, source: list[int], target: list[int]) -> None:
        """One pull with its epoch check."""
        check = sealed_check(self.table, source, [EPOCH] * len(source))
        moved = link.pull("theirs", source, "mine", target, timeout_ms=TIMEOUT_MS, check=check).result()
        if moved.stale:
            raise RuntimeError(f"stale pages {moved.stale}")

    def verify(self, own: OwnPages, page_bytes: int, source: list[int], target: list[int]) -> None:
        """First and last word of every page that was pulled."""
        self.gpu.copy.make_current()
        for there, here in zip(source, target, strict=True):
            begin = own.address + here * page_bytes
            words = {self.gpu.word(begin), self.gpu.word(begin + page_bytes - 4)}
            if words != {there + 1}:
                raise RuntimeError(f"page {there} arrived as {words}")

    def pages(self, page_bytes: int) -> None:
        """Warm pulls of NUM scattered pages; with the smaller pages 4,096 pieces of 32 KiB too."""
        num_pages = 2 * NUM
        self.order("make", num_pages, page_bytes, page_bytes)
        window, description, _, _ = self.import_pool(num_pages, page_bytes)
        own = self.gpu.pages(num_pages, page_bytes)
        source, target = scattered(NUM, num_pages, 1), scattered(NUM, num_pages, 2)
        name = f"{NUM} x {page_bytes // MIB} MiB"
        for lanes in LANES:
            link = self.link(window, description, own, lanes, page_bytes)
            wall_us = timed(lambda link=link: self.pull_pages(link, source, target), self.repeats)
            self.verify(own, page_bytes, source, target)
            self.add("pages", name, f"{lanes} lanes", NUM * page_bytes, wall_us)
            if page_bytes == SETS[0]:
                self.pieces(link, num_pages * page_bytes, f"{lanes} lanes")
        own.close()
        window.close()
        self.order("drop")

    def pieces(self, link: Link, num_bytes: int, case: str) -> None:
        """As MemServe's discrete layout: each piece by itself."""
        there = scattered(NUM_PIECES, num_bytes // PIECE, 3)
        here = scattered(NUM_PIECES, num_bytes // PIECE, 4)
        pieces = Pieces.of_pages(there, here, PIECE)

        def pull() -> None:
            link.pull_pieces("theirs", "mine", pieces, timeout_ms=TIMEOUT_MS).result()

        self.add("pages", f"{NUM_PIECES} x 32 KiB", case, NUM_PIECES * PIECE, timed(pull, self.repeats))

    def attach(self, pool_gib: int) -> None:
        """First contact with a large pool: attach, then the first pull ever."""
        page_bytes = SETS[1]
        num_pages = pool_gib * 1024 * MIB // page_bytes
        made_s = self.order("make", num_pages, page_bytes, page_bytes)
        before = count_fds()
        window, description, sent, attach_s = self.import_pool(num_pages, page_bytes)
        fds_open = count_fds() - before
        own = self.gpu.pages(NUM, page_bytes)
        link = self.link(window, description, own, LANES[-1], page_bytes)
        source, target = scattered(NUM, num_pages, 5), list(range(NUM))
        begun = time.perf_counter()
        self.pull_pages(link, source, target)
        cold_us = (time.perf_counter() - begun) * 1e6
        self.verify(own, page_bytes, source, target)
        row = {
            "section": "attach",
            "pool_gib": pool_gib,
            "page_bytes": page_bytes,
            "made_s": round(made_s, 3),
        }
        row |= {"attach_s": round(attach_s, 3), "fds_sent": sent, "fds_open": fds_open}
        self.samples.append({**row, "cold_us": round(cold_us, 1), "bytes": NUM * page_bytes})
        print(
            f"  attach   {pool_gib} GiB: {attach_s:.2f} s, {sent} fds, first pull {cold_us:.0f} us",
            flush=True,
        )
        own.close()
        window.close()
        self.order("drop")

    def nccl(self) -> None:
        """torch's NCCL: pieces in one group, and one call for each."""
        port = free_port()
        self.wire.send("order", ["nccl", port])
        torch = torch_pair(0, port)
        buffer = torch.zeros(NUM * SETS[0], dtype=torch.uint8, device="cuda:0")
        for size, num in ((SETS[0], NUM), (PIECE, NUM_PIECES)):
            name = f"{num} x {size // MIB} MiB" if size >= MIB else f"{num} x {size >> 10} KiB"
            for grouped in (True, False):
                repeats = max(3, self.repeats // 3)
                self.wire.send("round", [size, num, grouped, repeats + 1])
                wall_us = timed(
                    lambda size=size, num=num, grouped=grouped: nccl_round(
                        torch, buffer, size, num, 0, grouped=grouped
                    ),
                    repeats,
                    1,
                )
                self.add("nccl", name, "grouped" if grouped else "per block", size * num, wall_us)
        self.wire.send("round", None)
        torch.distributed.destroy_process_group()
        self.wire.receive("answer")

    def nixl(self) -> None:
        """cudaMalloc slabs at both ends, pages by READ and by a WRITE that the source is asked for."""
        size = 2 * NUM * SETS[0]
        address = self.gpu.slab(size)
        for mode in ("write", "read"):
            description = self.order("nixl", size)
            transport = NixlTransport("puller", mode=mode, prepare=self.gpu.copy.make_current)
            transport.register(region("mine", RegionKind.CUDA_SLAB, address, SETS[0], 2 * NUM, self.gpu))
            self.order("nixl-link", transport.describe())
            link = transport.connect(Peer(description, channel=ChannelOverWire(self.wire)))
            self.wire.on_message = link.on_message
            for piece, num in ((SETS[0], NUM), (PIECE, NUM_PIECES)):
                there, here = scattered(num, size // piece, 6), scattered(num, size // piece, 7)
                pieces = Pieces.of_pages(there, here, piece)

                def pull(link: Link = link, pieces: Pieces = pieces) -> None:
                    link.pull_pieces("theirs", "mine", pieces, timeout_ms=TIMEOUT_MS).result()

                name = f"{num} x {piece // MIB} MiB" if piece >= MIB else f"{num} x {piece >> 10} KiB"
                self.add("nixl", name, mode, num * piece, timed(pull, max(3, self.repeats // 2)))
            transport.close()
            self.order("nixl-close")
        self.gpu.copy.make_current()
        self.gpu.free_slabs()


def measure(wire: Wire, pool_gib: int, repeats: int) -> list[Sample]:
    """Every section in a try of its own."""
    begun_s = time.monotonic()
    puller = Puller(wire, repeats)
    sections: list[tuple[str, Callable[[], None]]] = [
        ("ceiling", puller.ceiling),
        *((f"pages of {size // MIB} MiB", lambda size=size: puller.pages(size)) for size in SETS),
        ("attach", lambda: puller.attach(pool_gib)),
        ("nixl", puller.nixl),
        ("nccl", puller.nccl),
    ]
    for name, section in sections:
        if time.monotonic() - begun_s > BUDGET_S:
            print(f"  {name}: no time left", flush=True)
            continue
        try:
            section()
        except Exception:  # noqa: BLE001  one section's failure must not lose the rest
            print(f"  {name} failed:\n{traceback.format_exc()}", flush=True)
    return puller.samples


def main(argv: Sequence[str]) -> int:
    """Measure, print, write. Exit status 1 when no page was pulled."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few repeats, 4 GiB pool; writes no result file")
    parser.add_argument("--pool-gib", type=int, default=100, help="size of the pool that is attached")
    options = parser.parse_args(argv)
    os.environ.update(QUIET)  # noqa: TID251  before torch and NCCL are loaded
    apply_ucx_environment(TransferSettings())
    process, wire = start_owner("loadtest.transfer_owner", ROOT)
    repeats = 3 if options.quick else 12
    try:
        samples = measure(wire, 4 if options.quick else options.pool_gib, repeats)
    finally:
        process.kill()
        process.wait()
    metrics = metrics_from_samples(samples)
    for key, value in sorted(metrics.items()):
        print(f"{key:28} {value:12.2f}")
    if samples and not options.quick:
        path = write_result(
            NAME,
            claim=CLAIM,
            command=shlex.join(["python", "-m", "loadtest.bench_transfer", *argv]),
            settings={"pages": NUM, "repeats": repeats, "lanes": list(LANES), "pool_gib": options.pool_gib},
            metrics=metrics,
            samples=samples,
        )
        print(f"wrote {path.relative_to(RESULTS.parents[1])}")
    return 0 if "page_pull_gb_per_s" in metrics else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
