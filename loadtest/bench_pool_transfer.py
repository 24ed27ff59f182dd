"""MemPool.transfer between two workers on two H200s: leases, epoch checks and the mempool's answer in every figure.

    python -m loadtest.bench_pool_transfer [--pool-gib 120] [--budget-s 300] [--out FOLDER] [--commit HEAD]

writes h200x2-pool-transfer.json. bench_transfer.py times a link between two processes; this one times the call that a
worker makes: keeper, mempool and two workers as processes (pool_transfer_worker.py), pages of the first worker named
and pinned, as many taken at the second one, then `transfer` from call to answer. Pages lie scattered at both ends.
Every set is measured both ways in one run, warm (0.5 s of the same transfers before): as a worker gets it (`case` says
whether its own copies were it, "direct"), and "mediated", by the mempool. Lists of addresses are as answers bring them.
Every page is wiped before and looked at behind the timed calls of each. `attach`: a
pool of --pool-gib on the source's GPU: the pool makes it, the worker maps it, descriptors that each process has more
than before; then the first transfer ever (`cold`), what is left of the mempool's own mapping included
(`first_contact`: refused ones before it). Beside them, in the same run: one plain copy, NIXL on cudaMalloc slabs, NCCL
grouped and call by call, as in bench_transfer.py.
`--device cpu`: host memory, for a try of the script.

`pool_transfer_gb_per_s`: the worst set of at least 64 MiB as a worker gets it; `mediated_gb_per_s`: by the mempool.
`direct_overhead_*`: own copies with the copy left out. With `--device cpu` tiny pages too: `*_fixed_us`, `*_page_us`.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from loadtest.child_commands import Child
from loadtest.lending_rig import child, module
from loadtest.processes import Fleet, free_port
from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, write_result

NAME = "h200x2-pool-transfer"
CLAIM = (
    "MemPool.transfer between two workers on two H200s, pages pinned and their epochs checked, moves 64 MiB and more "
    "at >= 300 GB/s from the call to the answer, at least twice as fast as NIXL moves cudaMalloc slabs."
)
MIB = 1 << 20
SETS = {2 * MIB: (1, 32, 64, 512), 8 * MIB: (1, 8, 64, 256)}  # page bytes: pages of one transfer
CPU_SETS = {4096: (1, 8, 64, 512), MIB: (1, 64), 2 * MIB: (1, 32)}
MEDIATED = "mediated"
LEAST_BYTES = 64 * MIB
SOURCE, TARGET = "worker-source", "worker-target"
SECTION_S = 45.0  # no section is begun with less left

Sample = dict[str, Any]


def metrics_from_samples(samples: Samples) -> Metrics:
    """Rates of median times. A section that did not run has no metric."""
    out: Metrics = {}
    rates: dict[tuple[str, str, str], float] = {}
    for row in sorted(
        samples, key=lambda row: row.get("pool_gib", 0.0)
    ):  # of several pools the largest counts
        if row["section"] == "attach":
            for key in ("made_s", "attach_s", "first_contact_s"):
                out[key] = row[key]
            out["cold_pull_gb_per_s"] = row["bytes"] / row["cold_us"] / 1e3
            for who in ("worker", "worker_most", "mempool", "keeper"):
                out[f"attach_{who}_fds_count"] = row["fds"][who]
            out["attach_pool_gib"] = row["pool_gib"]
        elif row["section"] == "stale":
            out["stale_asked_count"] = out.get("stale_asked_count", 0) + row["asked"]
            out["stale_refused_count"] = out.get("stale_refused_count", 0) + row["refused"]
        else:
            rates[row["section"], row["set"], row["case"]] = row["bytes"] / median(row["wall_us"]) / 1e3
    pool = [row for row in samples if row["section"] == "pool"]
    out |= of_way("pool_transfer", [row for row in pool if row["case"] != MEDIATED])
    bare = {row["pages"]: median(row["wall_us"]) for row in samples if row["section"] == "overhead"}
    if len(bare) > 1:
        fewest, most = min(bare), max(bare)
        out["direct_overhead_page_us"] = (bare[most] - bare[fewest]) / (most - fewest)
        out["direct_overhead_fixed_us"] = bare[fewest]
    out |= of_way("mediated", [row for row in pool if row["case"] == MEDIATED])

    def best(section: str, name: str, case: str = "") -> float | None:
        return max(
            (rate for key, rate in rates.items() if key[:2] == (section, name) and key[2].startswith(case)),
            default=None,
        )

    for metric, value in (
        ("copy_ceiling_gb_per_s", best("ceiling", "256 MiB")),
        ("nccl_grouped_gb_per_s", best("nccl", "64 x 2 MiB", "grouped")),
        ("nccl_per_page_gb_per_s", best("nccl", "64 x 2 MiB", "per block")),
        ("nccl_per_block_gb_per_s", best("nccl", "4096 x 32 KiB", "per block")),
        ("nixl_gb_per_s", best("nixl", "64 x 2 MiB")),
    ):
        if value is not None:
            out[metric] = value
    beside = out.get("pool_transfer_64x2mib_gb_per_s")
    for name in ("nixl", "nccl_grouped", "copy_ceiling"):
        if beside is not None and f"{name}_gb_per_s" in out:
            out[f"pool_over_{name}_ratio"] = beside / out[f"{name}_gb_per_s"]
    return out


def of_way(way: str, rows: Samples) -> Metrics:
    """Every set that went one way; the overhead, where pages are tiny."""
    out: Metrics = {}
    large: list[float] = []
    tiny: dict[int, float] = {}
    for row in rows:
        us = median(row["wall_us"])
        rate = row["bytes"] / us / 1e3
        name = f"{way}_{row['pages']}x{short(row['page_bytes'])}"
        out |= {f"{name}_gb_per_s": rate, f"{name}_us": us}
        if row["bytes"] >= LEAST_BYTES:
            large.append(rate)
        if row["page_bytes"] < MIB:
            tiny[row["pages"]] = us
    if large:
        out |= {f"{way}_gb_per_s": min(large), f"{way}_best_gb_per_s": max(large)}
    if len(tiny) > 1:
        fewest, most = min(tiny), max(tiny)
        out[f"{way}_page_us"] = (tiny[most] - tiny[fewest]) / (most - fewest)
        out[f"{way}_fixed_us"] = tiny[fewest]
    return out


def short(page_bytes: int) -> str:
    """As metrics say it."""
    return f"{page_bytes // MIB}mib" if page_bytes >= MIB else f"{page_bytes // 1024}kib"


class Pool:
    """Keeper, mempool and two workers; ended with the block."""

    def __init__(self, stack: ExitStack, device: str) -> None:
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-pool-transfer-")))
        self._device = device
        self._keeper = stack.enter_context(keeper(self.folder))
        fleet = self._fleet = stack.enter_context(Fleet(self.folder / "logs"))
        self._admin = f"127.0.0.1:{free_port()}"
        flags = ["--socket", self._at("pool.sock"), "--api-socket", self._at("api.sock")]
        flags += ["--admin-listen", self._admin, "--keeper-socket", self._at("keeper.sock")]
        flags += ["--copy-timeout-ms", "20000"]
        fleet.start("mempool", module("services.mempool", flags), ready_url=f"http://{self._admin}/health")
        words = ["loadtest.pool_transfer_worker"]
        self.source = child("source", words, self.folder, stack)
        self.target = child("target", words, self.folder, stack)

    def _at(self, name: str) -> str:
        return str(self.folder / name)

    def attach(self, worker: Child, instance: str, ordinal: int, num_bytes: int, page_bytes: int) -> Sample:
        """What the worker says of it."""
        if self._device == "cuda":
            from loadtest.peer_memory import gpu_device

            device = gpu_device(ordinal)
        else:
            device = f"cpu:{ordinal}"
        return worker.ask(
            "attach", socket=self._at("pool.sock"), api_socket=self._at("api.sock"), instance=instance,
            device=device, ordinal=ordinal, capacity=num_bytes, page=page_bytes,
        )  # fmt: skip

    def status(self) -> dict[str, Any]:
        """Of the mempool."""
        with urllib.request.urlopen(f"http://{self._admin}/status", timeout=10) as answer:
            return json.loads(answer.read())

    def fds(self) -> dict[str, int]:
        """Of mempool and keeper, now."""
        pids = {"mempool": self._fleet.pid("mempool"), "keeper": self._keeper.pid}
        return {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in pids.items()}

    def log_tail(self) -> str:
        """What the mempool said last."""
        return (self.folder / "logs" / "mempool.log").read_text(errors="replace")[-1500:]


@contextmanager
def keeper(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The process that holds descriptors for the mempool's successor."""
    path = folder / "keeper.sock"
    with (folder / "keeper.log").open("wb") as log:
        words = ["-m", "services.mempool.keeper", "--socket", str(path)]
        process = subprocess.Popen([sys.executable, *words], stdout=log, stderr=log, cwd=ROOT)
    try:
        deadline = time.monotonic() + 30
        while not path.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the keeper did not start: {(folder / 'keeper.log').read_text()[-1500:]}")
            time.sleep(0.02)
        yield process
    finally:
        process.terminate()
        process.wait(20)


def transfers(
    device: str, page_bytes: int, counts: Sequence[int], pool_bytes: int, repeats: int
) -> Iterator[Sample]:
    """Of one page size: attach, first contact, every set, stale sources. `pool_bytes`: of the source's pages."""
    with ExitStack() as stack:
        pool = Pool(stack, device)
        stack.push(lambda kind, *_: print(f"  the mempool said:\n{pool.log_tail()}") if kind else None)
        own_bytes = (4 * max(counts) + 64) * page_bytes  # callers get half of a space
        before = pool.fds()
        said = pool.attach(pool.source, SOURCE, 1, max(pool_bytes, own_bytes), page_bytes)
        pool.attach(pool.target, TARGET, 0, own_bytes, page_bytes)
        first = min((count for count in counts if count * page_bytes >= LEAST_BYTES), default=max(counts))
        for count in (first, *(count for count in counts if count != first)):
            pool.source.ask("take", num=count)
            pages = pool.source.ask("take_targets", num=count, instance=TARGET)["pages"]
            pool.target.ask("wipe", pages=pages)
            common = {"bytes": count * page_bytes, "page_bytes": page_bytes, "pages": count}
            if count == first:
                contact = pool.source.ask("first_contact", instance=TARGET)
                pool.target.ask("check", pages=pages)
                mapped = pool.source.ask("mapped", instance=TARGET)
                now = pool.fds()
                fds = {name: now[name] - before[name] for name in now}
                yield {
                    "section": "attach", **common, "pool_gib": round(said["num_pages"] * page_bytes / (1 << 30), 3),
                    "handles": said["handles"], "made_s": said["made_s"], "attach_s": said["attach_s"],
                    "first_contact_s": contact["waited_s"], "failed_before": contact["failed"],
                    "cold_us": contact["cold_us"], "direct_ready_s": mapped["waited_s"],
                    "direct_compiled_s": mapped["compiled_s"],
                    "fds": {"worker": said["open_fds"], "worker_most": said["most_fds"], **fds},
                }  # fmt: skip
                pool.target.ask("wipe", pages=pages)
            for mediated in (False, True):
                pool.target.ask("wipe", pages=pages)
                found = pool.source.ask("transfer", instance=TARGET, repeats=repeats, mediated=mediated)
                pool.target.ask("check", pages=pages)
                case = "MemPool.transfer, direct" if found["direct"] == repeats else "MemPool.transfer"
                yield {
                    "section": "pool", "set": f"{count} x {short(page_bytes)}", **common,
                    "case": MEDIATED if mediated else case, "paths": sorted(pool.status()["copies"]["paths"]), **found,
                }  # fmt: skip
                if not mediated and found["direct"] == repeats:
                    bare = pool.source.ask("overhead", instance=TARGET, repeats=4 * repeats)
                    yield {
                        "section": "overhead", "set": f"{count} x {short(page_bytes)}", "case": "without the copy",
                        **common, **bare,
                    }  # fmt: skip
            if count == first:
                pool.target.ask("wipe", pages=pages)
                yield {"section": "stale", **pool.source.ask("stale", instance=TARGET)}
            pool.source.ask("give_up")


def peers(repeats: int) -> Iterator[Sample]:
    """A plain copy, NIXL and NCCL over the same GPUs, as bench_transfer.py takes them."""
    from loadtest.bench_transfer import Puller
    from loadtest.transfer_rig import QUIET, start_owner
    from shared.transfer.config import TransferSettings, apply_ucx_environment

    os.environ.update(QUIET)  # noqa: TID251  before torch and NCCL are loaded
    apply_ucx_environment(TransferSettings())
    process, wire = start_owner("loadtest.transfer_owner", ROOT)
    puller = Puller(wire, repeats)
    try:
        for section in (puller.ceiling, puller.nixl, puller.nccl):
            try:
                section()
            except Exception:  # noqa: BLE001  one section's failure must not lose the rest
                print(f"  failed:\n{traceback.format_exc()}", flush=True)
            yield from puller.samples
            puller.samples.clear()
    finally:
        process.kill()
        process.wait()


def said(row: Sample) -> str:
    """A line for a sample."""
    if row["section"] == "attach":
        return (
            f"attach {row['pool_gib']} GiB in {row['handles']} handles: made {row['made_s']} s, mapped "
            f"{row['attach_s']} s, for own copies {row['direct_ready_s']} s behind the first transfer, first contact "
            f"{row['first_contact_s']} s, cold {row['cold_us']} us, "
            f"descriptors {row['fds']}"
        )
    if row["section"] == "stale":
        return f"stale sources refused: {row['refused']} of {row['asked']}"
    rate = row["bytes"] / median(row["wall_us"]) / 1e3
    return f"{row['section']:8} {row['set']:14} {row['case']:24} {rate:8.1f} GB/s {median(row['wall_us']):10.0f} us"


def measure(options: argparse.Namespace) -> list[Sample]:
    """Every section in a try of its own, none begun without time for it."""
    end_s = time.monotonic() + options.budget_s
    sets = CPU_SETS if options.device == "cpu" else SETS
    repeats = 5 if options.quick else options.repeats
    pools = {max(sets): int(options.pool_gib * (1 << 30))}
    sections: list[tuple[str, Callable[[], Iterator[Sample]]]] = [
        (f"pages of {short(size)}", lambda size=size: transfers(
            options.device, size, sets[size], pools.get(size, 0), repeats
        ))
        for size in sorted(sets, reverse=True)
    ]  # fmt: skip
    if options.device == "cuda":
        sections.append(("peers", lambda: peers(max(6, repeats // 4))))
    samples: list[Sample] = []
    for name, section in sections:
        if time.monotonic() > end_s - SECTION_S:
            print(f"  {name}: no time left", flush=True)
            continue
        try:
            for row in section():
                samples.append(row)
                if row["section"] in ("attach", "stale", "pool", "overhead"):
                    print(f"  {said(row)}", flush=True)
        except Exception:  # noqa: BLE001  one section's failure must not lose the rest
            print(f"  {name} failed:\n{traceback.format_exc()}", flush=True)
    return samples


def main(argv: Sequence[str]) -> int:
    """Measure, print, write. Exit status 1 when nothing was transferred."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="few repeats; writes no result file")
    parser.add_argument("--pool-gib", type=float, default=120.0, help="of the source's pages")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--budget-s", type=float, default=300.0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="")
    options = parser.parse_args(argv)
    begun_s = time.monotonic()
    samples = measure(options)
    metrics = metrics_from_samples(samples)
    if samples and not options.quick and options.device == "cuda":
        path = write_result(
            NAME, claim=CLAIM, command=shlex.join(["python", "-m", "loadtest.bench_pool_transfer", *argv]),
            settings={"repeats": options.repeats, "pool_gib": options.pool_gib}, metrics=metrics, samples=samples,
            folder=options.out, commit=options.commit,
        )  # fmt: skip
        print(f"wrote {path.name}")
    for key, value in sorted(metrics.items()):
        print(f"{key:40} {value:12.3f}")
    print(f"{time.monotonic() - begun_s:.0f} s")
    return 0 if "pool_transfer_gb_per_s" in metrics else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
