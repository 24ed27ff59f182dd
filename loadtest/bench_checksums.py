"""What checksums of pages cost, by the share of blocks that have one (mempool.checksum_rate).

    python -m loadtest.bench_checksums [--quick] [--out FOLDER]      writes loadtest/results/checksums.json

A real mempool for each rate, all of them at once and used in turns; this process is their engine and their reader. A
prompt has 64 blocks of 1 MiB, as a model of 8B parameters has for 8 tokens. Each turn seals a prompt of its own and,
when every sum that is to be taken has been, leases it twice; nobody computes meanwhile.

    lease_*_us              from the call to the answer, which waits for the look at the pages of the sample
    look_us_per_mib         what a lease takes longer for each MiB that is looked at
    cpu_*_us_per_gib        of the mempool, all its threads, for 1 GiB sealed and leased twice
    sum_gb_per_s            the ceiling: the same bytes summed by one thread of this process

`none`, `default`, `tenth`, `all`: rates of 0, 0.01, 0.1 and 1.
"""

import argparse
import asyncio
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import xxhash

from loadtest.processes import process_cpu_us
from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, quantile, write_result
from services.mempool.config import MempoolSettings
from shared.free_ports import free_port
from shared.ids import BlockHash, InstanceId
from shared.kv.layout import EngineDescription
from shared.mempool.client import MempoolClient
from shared.mempool.engine_attachment import EngineAttachment, SealEntry

NAME = "checksums"
CLAIM = (
    "With the default share of blocks that have a checksum, a lease of 64 blocks of 1 MiB takes in the median at most "
    "1.1 of its time without checksums; a look takes at most 0.2 ms a MiB."
)
RATES = {"none": 0.0, "default": MempoolSettings().checksum_rate, "tenth": 0.1, "all": 1.0}
BLOCKS, BLOCK_BYTES = 64, 1 << 20
LEASES = 2  # of each prompt
SEED = BlockHash(bytes(32))
DESCRIPTION = EngineDescription(
    model="bench", fingerprint="bench", dtype="bfloat16", layout="layers-blocks", backend="none", block_tokens=8,
    block_bytes=BLOCK_BYTES,
)  # fmt: skip
LIMIT_S = 60.0


def metrics_from_samples(samples: Samples) -> Metrics:
    """Of each rate."""
    out: Metrics = {"sum_gb_per_s": max(s["gb_per_s"] for s in samples if s["what"] == "sum")}
    for name in RATES:
        leases = [s["us"] for s in samples if s["what"] == "lease" and s["rate"] == name]
        out[f"lease_{name}_p50_us"] = median(leases)
        out[f"lease_{name}_p99_us"] = quantile(leases, 0.99)
        turns = [s for s in samples if s["what"] == "cpu" and s["rate"] == name]
        sealed_gib = sum(s["sealed_bytes"] for s in turns) / (1 << 30)
        out[f"cpu_{name}_us_per_gib"] = sum(s["us"] for s in turns) / sealed_gib
        out[f"checked_{name}_pages"] = float(sum(s["checked"] for s in turns))
    out["default_p50_ratio"] = out["lease_default_p50_us"] / out["lease_none_p50_us"]
    lease_mib = BLOCKS * BLOCK_BYTES / (1 << 20)
    out["look_us_per_mib"] = (out["lease_all_p50_us"] - out["lease_none_p50_us"]) / lease_mib
    return out


class Pool:
    """One mempool process, an engine of it and a client."""

    def __init__(self, folder: Path, rate: float) -> None:
        self.socket, self.admin = folder / "mempool.sock", f"http://127.0.0.1:{free_port()}"
        flags = {
            "socket": self.socket, "admin-listen": self.admin.removeprefix("http://"), "checksum-rate": rate,
            "capacity-bytes": 3 * BLOCKS * BLOCK_BYTES, "log-level": "warning",
        }  # fmt: skip
        words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
        self.process = subprocess.Popen([sys.executable, "-m", "services.mempool", *words], cwd=ROOT)
        self.engine = EngineAttachment(self.socket, InstanceId("bench"), DESCRIPTION, BLOCKS)
        self.client = MempoolClient(self.socket, InstanceId("bench"))

    async def __aenter__(self) -> "Pool":
        if not await asyncio.to_thread(self.engine.wait_connected, LIMIT_S):
            raise RuntimeError("the mempool does not answer")
        self.client.start()
        await self.client.wait_connected(int(LIMIT_S * 1e3))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        self.engine.close()
        self.process.terminate()
        self.process.wait(LIMIT_S)

    def status(self) -> dict[str, Any]:
        """The mempool's."""
        return httpx.get(f"{self.admin}/status", timeout=LIMIT_S).json()

    @property
    def num_checked(self) -> int:
        """Pages, since its start."""
        return self.status()["counters"]["checks_pages_checked"]

    async def seal(self, hashes: Sequence[BlockHash]) -> None:
        """New bytes in pages of ours; back when no sum is due any more."""
        taken: list[Any] = []
        until_s = time.monotonic() + LIMIT_S
        while len(taken) < len(hashes):
            taken += self.engine.take_pages(len(hashes) - len(taken))
            await asyncio.sleep(0.001)
            if time.monotonic() > until_s:
                raise RuntimeError(f"{len(taken)} of {len(hashes)} pages in {LIMIT_S} s")
        self.engine.writing(taken)
        for (page, _), block_hash in zip(taken, hashes, strict=True):
            self.engine.page_view(page)[:] = block_hash * (BLOCK_BYTES // len(block_hash))
        lines = zip(taken, hashes, [SEED, *hashes], strict=False)
        self.engine.seal([SealEntry(page, epoch, h, parent, 8) for (page, epoch), h, parent in lines])
        await asyncio.sleep(0.02)
        while self.status()["checks_waiting"]:  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    async def lease(self, hashes: Sequence[BlockHash]) -> float:
        """us of one."""
        begin = time.perf_counter_ns()
        got = await self.client.acquire(list(hashes))
        took_us = (time.perf_counter_ns() - begin) / 1e3
        if got is None or got.num_blocks != len(hashes):
            raise RuntimeError(f"{got.num_blocks if got else 0} of {len(hashes)} blocks")
        self.client.release(got.lease_id)
        return took_us


def chain(turn: int) -> list[BlockHash]:
    """Of a prompt that nobody has had."""
    out, link = [], turn.to_bytes(32, "little")
    for _ in range(BLOCKS):
        link = hashlib.sha256(link).digest()
        out.append(BlockHash(link))
    return out


async def one_turn(name: str, pool: Pool, turn: int) -> list[dict[str, Any]]:
    """Seal a prompt, lease it, forget it."""
    hashes = chain(turn)
    before, cpu_us = pool.num_checked, process_cpu_us(pool.process.pid)
    await pool.seal(hashes)
    out = [{"what": "lease", "rate": name, "us": await pool.lease(hashes)} for _ in range(LEASES)]
    checked = pool.num_checked - before
    out.append(
        {
            "what": "cpu", "rate": name, "us": process_cpu_us(pool.process.pid) - cpu_us,
            "sealed_bytes": BLOCKS * BLOCK_BYTES, "checked": checked,
        }
    )  # fmt: skip
    await pool.client.delete(hashes)
    return out


def ceiling() -> dict[str, Any]:
    """One thread sums bytes that are in no cache."""
    data = os.urandom(BLOCK_BYTES * 64)
    begin = time.perf_counter_ns()
    xxhash.xxh3_64_intdigest(data)
    return {"what": "sum", "gb_per_s": len(data) / (time.perf_counter_ns() - begin)}


async def measure(num_turns: int) -> list[dict[str, Any]]:
    """All samples."""
    samples = [ceiling() for _ in range(5)]
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pools = {}
        for name, rate in RATES.items():
            (folder / name).mkdir()
            pools[name] = await stack.enter_async_context(Pool(folder / name, rate))
        for turn in range(num_turns + 2):
            for name, pool in pools.items():
                found = await one_turn(name, pool, turn)
                samples += found if turn >= 2 else []  # the first have page faults in them
    return samples


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few turns, nothing is written")
    parser.add_argument("--out", type=Path, default=RESULTS, help="another folder for the result")
    args = parser.parse_args(argv)
    num_turns = 5 if args.quick else 60
    samples = asyncio.run(measure(num_turns))
    metrics = metrics_from_samples(samples)
    for name, value in metrics.items():
        print(f"{name:28} {value:12.1f}")
    if args.quick:
        return 0
    settings = {
        "blocks": BLOCKS,
        "block_bytes": BLOCK_BYTES,
        "rates": RATES,
        "turns": num_turns,
        "leases": LEASES,
    }
    path = write_result(
        NAME,
        claim=CLAIM,
        command="python -m loadtest.bench_checksums",
        settings=settings,
        metrics=metrics,
        samples=samples,
        folder=args.out,
    )
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
