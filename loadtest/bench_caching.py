"""What context caching saves: MemServe's Figure 13. Prompts of which a share is cached, through the serving cluster.

    python -m loadtest.bench_caching [--device cuda] [--rounds 3] [--resume FILE] [--out FOLDER] [--commit HEAD]
                                          writes context-caching.json, on a GPU h200-context-caching.json

`quire up` with one colocated worker. A prompt's beginning is asked for first, so that its blocks are cached; then the
whole prompt, and the time to its one token is what counts, gateway and all: the fastest of the rounds, as other work
on the machine only ever adds. (a) by prompt length; (b) prompts that come together, to the last one's token; (c) by
block size, a cluster for each; (d) the cached blocks in the engine's own pages, or in host memory behind them, where
swap_out of the nine calls has put them, and from where the mempool brings them back first. On CPU both are host memory,
and the way back is a copy by the CPU. A sample whose receipt says otherwise than was meant is thrown away.
The demo model on one CPU thread; on a GPU an 8B shape with random weights.
"""

import argparse
import asyncio
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.http_client import Client
from loadtest.locality_cluster import Arm, LocalityCluster, Start
from loadtest.progress import Progress
from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, write_result
from loadtest.workloads.request import content_id
from loadtest.workloads.tokens import TokenRange, pseudo_tokens
from shared.ids import InstanceId
from shared.kv.block_hash import chain_seed
from shared.mempool.api import MemPoolApi

NAME = "context-caching"
CLAIM = (
    "Cached context shortens the time to the first token, the more of it and the longer the prompt, for prompts that "
    "come together too, with every block size, and from host memory where enough of the prompt is cached (MemServe 13)."
)
ARM = Arm("cost", "cost", {})
EIGHTHS = (0, 2, 4, 6, 7)  # of a prompt, cached
REST_S = 0.1  # before what is measured: what went before may still be noted somewhere
TRIES = 3  # for a sample whose receipt says what was meant
DRAM_BYTES = {"cpu": 256 << 20, "cuda": 32 << 30}


@dataclass(frozen=True, slots=True)
class Point:
    """`batch` prompts of `tokens`, of which `cached` are cached in `place` ("engine" or "dram")."""

    tokens: int
    cached: int
    batch: int = 1
    place: str = "engine"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured on a device. The first block size has everything, the others `middle` alone."""

    blocks: tuple[int, ...]
    lengths: tuple[int, ...]
    middle: int
    batches: tuple[int, ...]
    batch_tokens: int

    def points(self, block_tokens: int) -> Iterator[Point]:
        """In the order in which they are run."""
        first = block_tokens == self.blocks[0]
        for eighths in EIGHTHS:
            for tokens in self.lengths if first else (self.middle,):
                yield Point(tokens, tokens * eighths // 8)
            if first:
                cached = self.batch_tokens * eighths // 8
                yield from (Point(self.batch_tokens, cached, batch) for batch in self.batches)
                if eighths:
                    yield Point(self.middle, self.middle * eighths // 8, place="dram")


PLANS = {
    "cpu": Plan((32, 64, 128), (512, 1024, 2048, 3072), 1024, (2, 4, 8), 512),
    "cuda": Plan((64, 128, 256), (2048, 8192, 16_384), 8192, (2, 4, 8), 2048),
}


def metrics_from_samples(samples: Samples) -> Metrics:
    """Of the fastest rounds: ms with nothing cached, and how much of it is saved, in percent, by what is cached."""
    best: dict[tuple[int, int, int, str, int], float] = {}
    for row in samples:
        key = (row["tokens"], row["batch"], row["block_tokens"], row["place"], row["cached"])
        best[key] = min(row["ms"], best.get(key, float("inf")))
    out: Metrics = {}
    pays: list[float] = []
    for (tokens, batch, block, place, cached), ms in sorted(best.items()):
        head = f"tokens{tokens}_batch{batch}_block{block}_{place}"
        nothing = best[tokens, batch, block, "engine", 0]
        if not cached:
            out[f"{head}_nothing_cached_ms"] = ms
            continue
        share = 100 * cached / tokens
        out[f"{head}_cached{share:g}_saved_percent".replace(".", "_")] = 100 * (1 - ms / nothing)
        if place == "dram" and ms < nothing:
            pays.append(share)
    if pays:
        out["dram_pays_from_cached_percent"] = min(pays)
    return out


class Asker:
    """Sends prompts of its own contents and says how long they took."""

    def __init__(self, cluster: LocalityCluster, api_socket: Path, block_tokens: int, model: str) -> None:
        self._client = Client(cluster.url)
        self._socket = api_socket
        self._block_tokens = block_tokens
        self._model = model
        self._number = 0
        self.instance = InstanceId(str(cluster.scheduler()["instances"][0]["instance"]))

    async def measure(self, point: Point) -> tuple[float, int]:
        """ms from the first prompt to the last answer; how many tokens were computed in all."""
        self._number += 1
        names = [content_id("caching", self._block_tokens, self._number, n) for n in range(point.batch)]
        for name in names if point.cached else ():
            await self._ask(name, point.cached)
        if point.place == "dram":
            await self._swap_out()
        requests = [self._bytes(name, point.tokens) for name in names]
        await asyncio.sleep(REST_S)
        replies = await asyncio.gather(*(self._client.post(one) for one in requests))
        bad = next((reply for reply in replies if not reply.ok), None)
        if bad is not None:
            raise RuntimeError(f"status {bad.status}: {bad.body[:300]!r}")
        begin_s = min(reply.started for reply in replies)
        end_s = max(reply.pieces[-1][0] for reply in replies)
        return (end_s - begin_s) * 1000, sum(self._computed(reply.body, point) for reply in replies)

    def _computed(self, body: bytes, point: Point) -> int:
        tokens: dict[str, int] = json.loads(body)["quire_receipt"]["tokens"]
        if point.place == "dram" and tokens["dram"] != point.cached:
            return -1
        return tokens["computed"]

    async def _ask(self, content: int, num_tokens: int) -> None:
        reply = await self._client.post(self._bytes(content, num_tokens))
        if not reply.ok:
            raise RuntimeError(f"status {reply.status}: {reply.body[:300]!r}")

    def _bytes(self, content: int, num_tokens: int) -> bytes:
        prompt = pseudo_tokens(content, num_tokens, TokenRange()).tolist()
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        return self._client.request_bytes("/v1/completions", body | {"quire_receipt": True})

    async def _swap_out(self) -> None:
        """Everything that the instance caches, to host memory."""
        seed = chain_seed("", "")  # nothing is named here
        api = MemPoolApi(self._socket, self.instance, seed=seed, block_tokens=self._block_tokens)
        await api.connect()
        try:
            while await api.swap_out(1_000):
                pass
        finally:
            api.close()

    def close(self) -> None:
        """Drop the connections."""
        self._client.close()


async def measure(asker: Asker, plan: Plan, block_tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Samples of one cluster; the rounds go over all points, so that a disturbance hits one round of each."""
    samples = []
    for _ in range(2):
        await asker.measure(Point(plan.middle, 0))  # shapes are seen for the first time
    for number in range(rounds):
        for point in plan.points(block_tokens):
            for _ in range(TRIES):
                ms, computed = await asker.measure(point)
                if computed == point.batch * (point.tokens - point.cached):
                    row = {"tokens": point.tokens, "cached": point.cached, "batch": point.batch}
                    row |= {"block_tokens": block_tokens, "place": point.place, "round": number}
                    samples.append({**row, "ms": round(ms, 3)})
                    break
                print(f"  again: {point} computed {computed} tokens", flush=True)
    asker.close()
    return samples


def run_cluster(options: argparse.Namespace, plan: Plan, block_tokens: int) -> list[dict[str, Any]]:
    """Start, measure, stop. Raises: RuntimeError with what `quire` said."""
    start = Start(options.device, "vllm", cluster=[f"dram_bytes={DRAM_BYTES[options.device]}"])
    with tempfile.TemporaryDirectory(prefix="quire-caching-") as name:
        folder = Path(name)
        flags = start.flags(folder, ["--topology", "colocated", "--decode", "1"])
        sections = start.sections()
        worker = {"block_tokens": block_tokens, "calibrate": "off"}
        sections["worker"] = {**sections.get("worker", {}), **worker}
        sections["mempool"] = {**sections.get("mempool", {}), "api_socket": str(folder / "api.sock")}
        with LocalityCluster(folder / "home", flags, sections, ARM) as cluster:
            asker = Asker(cluster, folder / "api.sock", block_tokens, cluster.model())
            return asyncio.run(measure(asker, plan, block_tokens, options.rounds))


def main(argv: Sequence[str]) -> int:
    """Measure, print, write. Exit status 3 when a block size is left (--blocks)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=list(PLANS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", default="", help="block sizes of this call, by comma")
    parser.add_argument("--resume", type=Path, help="JSON lines of finished block sizes")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="")
    options = parser.parse_args(argv)
    plan = PLANS[options.device]
    progress = Progress(
        options.resume, lambda row: f"block {row['block_tokens']}: {len(row['samples'])} samples"
    )
    for block_tokens in [int(word) for word in options.blocks.split(",")] if options.blocks else plan.blocks:
        if progress.has(block_tokens=block_tokens) is None:
            found = run_cluster(options, plan, block_tokens)
            progress.add({"block_tokens": block_tokens, "samples": found})
    samples = [row for part in progress.samples for row in part["samples"]]
    metrics = metrics_from_samples(samples)
    for key, value in metrics.items():
        print(f"{key:64} {value:10.2f}")
    if {part["block_tokens"] for part in progress.samples} < set(plan.blocks):
        return 3
    path = write_result(
        NAME if options.device == "cpu" else f"h200-{NAME}",
        claim=CLAIM,
        command=shlex.join(["python", "-m", "loadtest.bench_caching", *argv]),
        settings={"rounds": options.rounds, "model": "quire-demo" if options.device == "cpu" else "8B shape"},
        metrics=metrics,
        samples=samples,
        folder=options.out,
        commit=options.commit,
    )
    print(f"wrote {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
