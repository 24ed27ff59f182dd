"""What a routing decision costs: prompt trees in Redis, the scheduler's placement, and other routers' beside it.

    python -m loadtest.bench_prompt_tree [--quick] [--out FOLDER] [--commit HEAD]      writes prompt-tree.json

A prompt has 256 blocks of 16 tokens: a document of 250 that some instances hold to some depth, and a question.

- Redis on loopback (an own server), one call at a time from this process, as a gateway and a worker make them.
  `lookup`: trees of 8 instances with 20 thousand blocks each; `lookup_spaces`: these, and their mempool's spaces with
  host memory behind; `lookup_100`: 100 instances; `lookup_head`: 100 that all hold its beginning, the worst case;
  `insert`: an owner's 256 new blocks. Floors: `ping`, a round trip; `mget`, one command that reads 256 keys;
  `..._redis_cpu`: of that, the server's CPU time. `lookup_remembered`: by the gateway's own memory.
- `rebuild`: 8 publishers with 20 thousand blocks each, Redis killed and started empty, until all of it is there again.
  `degraded_lookup_max`: the longest look-up while Redis is stopped (SIGSTOP).
- `placement`: Poisson arrivals, 1,000 a second, at the scheduler's process over ZeroMQ, 8 instances reporting (a
  connection each), `placement_100` with 100. From packed tokens to the answer: block hashes, look-up in their trees,
  decision, as for a request that nobody traces or wants a receipt of. `tree`: the first two (hashes of documents are
  remembered, as a gateway does; each question is new); `place`: the scheduler alone. No tokenizer, no HTTP. With 100:
  `..._remembered`, the gateway's cache of look-ups; `..._retractions`, that and owners that retract 20 times a second;
  `..._by_prompt_tree`, that policy instead of the default, which predicts with a cost model.
  `..._cpu_us_per_request` of all who take part; `sender` is this process: a gateway's part, and the load itself.
- Other routers with their defaults, each with the policies round_robin and cache_aware, before 8 engines that answer
  at once: prompts of 16 KiB about 64 documents, whole HTTP requests, 1,000 a second, or half of what the router carries
  in a closed loop if that is less. `added`: the request's time less that of the same load without a router (`direct`);
  `closed_loop`: its time per request with 16 users. They parse HTTP and JSON, pass the request on, and guess from the
  text that they sent where; Quire's decision asks what engines hold, and does neither of the first two
  (gateway-cpu.json has those). sglang-router and smg run from folders of their own, where they are installed:
  uv pip install --target .quire/bench/peers/sglang_router sglang-router; the same for smg. vllm-router is in the
  extra `loadtest`.
All processes share the machine's cores. With --realtime they go before anybody else's, closed loops apart.
"""

import argparse
import asyncio
import os
import random
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from loadtest import tree_peers
from loadtest.processes import Fleet, StartFailed
from loadtest.registry import RESULTS
from loadtest.results import Metrics, Samples, quantile, write_result
from loadtest.systems import Unavailable
from loadtest.tree_placement import cpu_us, placements, start_scheduler
from loadtest.tree_rig import (
    CALL_MS,
    PROMPT_BLOCKS,
    TAG,
    Trees,
    ahead_of_others,
    documents,
    hashes_of,
    prompt,
    short,
    timed_us,
    until,
)
from shared.cpus import usable_cpus
from shared.ids import Epoch
from shared.prompttree.client import PromptTreeClient
from shared.prompttree.lookup_cache import LookupCache
from shared.prompttree.publisher import PromptTreePublisher
from shared.prompttree.scripts import OWNERS, WRITE

NAME = "prompt-tree"
CLAIM = (
    "A look-up of 256 blocks in the prompt trees of several instances takes at most 150 us (p50), their insertion "
    "400 us, through Redis on loopback; 99% of 1,000 requests a second are placed within 2 ms, tokenizing excluded."
)
NUM_OWNERS, MANY_OWNERS = 8, 100
BACKGROUND_BLOCKS = 20_000
NUM_DOCUMENTS = 64
RATE_PER_S = 1_000.0
RETRACTIONS_PER_S = 20.0
CACHE_ANSWERS = 1_024


def metrics_from_samples(samples: Samples) -> Metrics:
    """Quantiles over all calls of a series; `added` subtracts quantiles of the series without a router."""
    out: Metrics = {}
    direct = next((s for s in samples if s["series"] == "router" and s["system"] == "direct"), None)
    for sample in samples:
        series = sample["series"]
        if series in ("calls", "placement"):
            for what, values in sample["times"].items():
                name, _, unit = what.rpartition("_")
                out[f"{name}_p50_{unit}"] = quantile(values, 0.5)
                out[f"{name}_p99_{unit}"] = quantile(values, 0.99)
        elif series == "router":
            name = sample["system"] if sample is direct else f"{sample['system']}_{sample['policy']}"
            for share, label in ((0.5, "p50"), (0.99, "p99")):
                value = quantile(sample["whole_ms"], share)
                if direct is not None and sample is not direct:
                    out[f"{name}_added_{label}_ms"] = value - quantile(direct["whole_ms"], share)
                else:
                    out[f"{name}_{label}_ms"] = value
            if "closed_per_s" in sample:
                out[f"{name}_closed_loop_ms_per_request"] = 1_000 / sample["closed_per_s"]
        out.update(sample.get("metrics", {}))
    out["failed_requests"] = float(sum(sample.get("failed", 0) for sample in samples))
    return out


class Bench:
    """Collects samples of one run; `scale` shortens everything for a quick look."""

    def __init__(self, folder: Path, scale: float, options: argparse.Namespace) -> None:
        self.folder = folder
        self.scale = scale
        self.rng = random.Random(options.seed)
        self.policy: str = options.policy
        self.realtime: bool = options.realtime
        self.policies: set[str] = set()
        self.samples: list[dict[str, Any]] = []
        self.skipped: list[str] = []

    def add(self, series: str, **values: Any) -> None:
        """One line of the result file."""
        self.samples.append({"series": series, "load_average": round(os.getloadavg()[0], 2), **values})
        for key, value in metrics_from_samples(self.samples[-1:]).items():
            print(f"  {key:44} {value:10.3f}", flush=True)

    def count(self, full: int) -> int:
        return max(100, int(full * self.scale))

    # -- Redis ------------------------------------------------------------------------------------

    async def calls(self) -> None:
        """Look-ups, inserts, and their floors."""
        trees = await Trees.start(self.folder / "calls")
        docs = documents(self.rng, NUM_DOCUMENTS)
        asked = [hashes_of(prompt(self.rng, self.rng.choice(docs))) for _ in range(200)]
        link, num = trees.link, self.count(5_000)

        async def ask(i: int) -> object:
            return await trees.client.lookup(asked[i % len(asked)], 16)

        async def all_asked() -> None:
            for i in range(len(asked)):
                await ask(i)

        for name, owners, spaces in (
            ("lookup", NUM_OWNERS, False),
            ("lookup_spaces", NUM_OWNERS, True),
            (f"lookup_{MANY_OWNERS}", MANY_OWNERS, False),
        ):
            background = BACKGROUND_BLOCKS if owners == NUM_OWNERS else BACKGROUND_BLOCKS // 10
            await trees.fill(self.rng, docs, owners, background, spaces=spaces)
            times = await timed_us(ask, num)
            inside = await trees.cpu_us(all_asked, len(asked), rounds=self.count(2_000) // len(asked) + 1)
            hits = sum([len(await trees.client.lookup(each, 16)) for each in asked]) / len(asked)
            self.add(
                "calls",
                times={f"{name}_us": times},
                mean_hits=round(hits, 2),
                metrics={f"{name}_redis_cpu_us": inside},
            )
        await self._heads(trees, docs[0])
        await trees.fill(self.rng, docs, NUM_OWNERS, BACKGROUND_BLOCKS, spaces=False)
        await self._floors(trees, asked, num)
        blobs = [self.rng.randbytes(16 * PROMPT_BLOCKS) for _ in range(num + 50)]

        async def insert(i: int) -> object:
            return await link.run(WRITE, OWNERS, "i0", 1, TAG, blobs[i], b"", timeout_ms=CALL_MS)

        self.add("calls", times={"insert_us": await timed_us(insert, num)})

        async def insert_again() -> None:
            for _ in range(1_000):
                blob = self.rng.randbytes(16 * PROMPT_BLOCKS)
                await link.run(WRITE, OWNERS, "i1", 1, TAG, blob, b"", timeout_ms=CALL_MS)

        inside = await trees.cpu_us(insert_again, 1_000)
        self.add("calls", times={}, metrics={"insert_redis_cpu_us": inside})
        await trees.stop()

    async def _heads(self, trees: Trees, doc: bytes) -> None:
        await trees.clear()
        blob = short(hashes_of(doc))
        for owner in range(MANY_OWNERS):
            depth = self.rng.randint(20, 250)
            await trees.add(f"i{owner}", "prefill", blob[: 16 * depth] + self.rng.randbytes(16 * 2_000))
        hashes = hashes_of(prompt(self.rng, doc))
        times = await timed_us(lambda _: trees.client.lookup(hashes, 16), self.count(2_000))
        self.add("calls", times={"lookup_head_us": times})

    async def _floors(self, trees: Trees, asked: Sequence[Sequence[bytes]], num: int) -> None:
        link = trees.link
        keys = [short([h])[:16].hex() for h in asked[0]]
        for key in keys:
            await link.call("SET", f"floor:{key}", b"i0", timeout_ms=CALL_MS)
        words = ("MGET", *(f"floor:{key}" for key in keys))
        remembering = PromptTreeClient(trees.server.url, cache=LookupCache(CACHE_ANSWERS, max_age_ms=600_000))
        remembering.open()
        await remembering.wait_up(CALL_MS)
        for name, call in (
            ("ping", lambda _: link.call("PING", timeout_ms=CALL_MS)),
            ("mget", lambda _: link.call(*words, timeout_ms=CALL_MS)),
            ("lookup_remembered", lambda _: remembering.lookup(asked[0], 16)),  # type: ignore[arg-type]
        ):
            self.add("calls", times={f"{name}_us": await timed_us(call, num)})
        await remembering.close()

    async def outage(self) -> None:
        """How long trees take to come back, and look-ups while there is no answer."""
        trees = await Trees.start(self.folder / "outage")
        blocks = [
            hashes_of(self.rng.randbytes(64 * self.count(BACKGROUND_BLOCKS))) for _ in range(NUM_OWNERS)
        ]
        publishers = [
            PromptTreePublisher(trees.server.url, owner=f"i{n}", epoch=Epoch(1), row="prefill")
            for n in range(NUM_OWNERS)
        ]
        for publisher, held in zip(publishers, blocks, strict=True):
            publisher.stored(held)
            publisher.open()
        await until(lambda: all(p.in_sync for p in publishers))
        trees.server.kill()
        await until(lambda: not any(p.in_sync for p in publishers))
        trees.server.start()
        begin = time.perf_counter()
        await until(lambda: all(p.in_sync for p in publishers))
        rebuild_s = time.perf_counter() - begin
        client = PromptTreeClient(trees.server.url)
        client.open()
        await client.wait_up(CALL_MS)
        os.kill(trees.server.pid, signal.SIGSTOP)
        times = await timed_us(lambda _: client.lookup(blocks[0][:256], 16), 200, warm=0)
        os.kill(trees.server.pid, signal.SIGCONT)
        found = {"rebuild_s": rebuild_s, "degraded_lookup_max_ms": max(times) / 1e3}
        self.add("outage", blocks=sum(map(len, blocks)), metrics=found, degraded_us=times)
        for publisher in publishers:
            await publisher.close()
        await client.close()
        await trees.stop()

    # -- the scheduler ----------------------------------------------------------------------------

    async def placement(self, fleet: Fleet) -> None:
        """Under load: the scheduler's default policy, with look-ups remembered, and policy prompt_tree."""
        trees = await Trees.start(self.folder / "placement")
        docs = documents(self.rng, NUM_DOCUMENTS)
        many = f"_{MANY_OWNERS}"
        for owners, background, label in (
            (NUM_OWNERS, BACKGROUND_BLOCKS, ""), (MANY_OWNERS, BACKGROUND_BLOCKS // 10, many),
        ):  # fmt: skip
            await trees.fill(self.rng, docs, owners, background, spaces=False)
            endpoint = start_scheduler(fleet, owners, self.policy)
            await self._placement(fleet, trees, endpoint, docs, label, None, 0.0)
            if owners == MANY_OWNERS:
                for name, per_s in (("_remembered", 0.0), ("_remembered_retractions", RETRACTIONS_PER_S)):
                    cache = LookupCache(CACHE_ANSWERS)
                    await self._placement(fleet, trees, endpoint, docs, many + name, cache, per_s)
            for name in ("reporters", "scheduler"):
                fleet.stop(name)
        endpoint = start_scheduler(fleet, MANY_OWNERS, "prompt_tree")
        await self._placement(fleet, trees, endpoint, docs, f"{many}_by_prompt_tree", None, 0.0)
        for name in ("reporters", "scheduler"):
            fleet.stop(name)
        await trees.stop()

    async def _placement(
        self,
        fleet: Fleet,
        trees: Trees,
        endpoint: str,
        docs: Sequence[bytes],
        label: str,
        cache: LookupCache | None,
        retractions_per_s: float,
    ) -> None:
        seconds = max(2.0, 12 * self.scale)
        before = cpu_us(fleet, trees)
        with ahead_of_others(self.realtime):
            times, policies = await placements(
                trees, endpoint, docs, self.rng, rate_per_s=RATE_PER_S, seconds=seconds,
                cache=cache, retractions_per_s=retractions_per_s,
            )  # fmt: skip
        after = cpu_us(fleet, trees)
        num = RATE_PER_S * (seconds + 1)  # with the second that warms up
        metrics = {f"found{label}_ratio": times.with_hits / max(1, len(times.whole_ms))}
        for name, spent_us in after.items():
            metrics[f"{name}_cpu{label}_us_per_request"] = (spent_us - before[name]) / num
        if cache is not None:
            metrics[f"lookups{label}_ratio"] = cache.num_hits / (cache.num_hits + cache.num_misses)
        named = {"placement": times.whole_ms, "tree": times.lookup_ms, "place": times.place_ms}
        self.policies |= policies
        self.add(
            "placement", times={f"{name}{label}_ms": values for name, values in named.items()}, metrics=metrics,
            failed=times.failed, policies=sorted(policies), sender_late_p99_ms=quantile(times.late_ms, 0.99),
            seconds=seconds,
        )  # fmt: skip

    # -- peers ------------------------------------------------------------------------------------

    async def peers(self, fleet: Fleet) -> None:
        """Other routers, and no router."""
        engines = tree_peers.start_engines(fleet)
        seconds = max(2.0, 6 * self.scale)
        load: dict[str, Any] = {"num_docs": NUM_DOCUMENTS}
        seed = self.rng.getrandbits(32)
        with ahead_of_others(self.realtime):
            times, failed = await tree_peers.through(
                engines, random.Random(seed), rate_per_s=RATE_PER_S, seconds=seconds, **load
            )
        self.add("router", system="direct", policy="", rate_per_s=RATE_PER_S, failed=failed, whole_ms=times)
        for kind in tree_peers.ROUTERS:
            for policy in tree_peers.POLICIES:
                try:
                    system = await asyncio.to_thread(tree_peers.start_router, fleet, kind, policy, engines)
                except (Unavailable, StartFailed) as error:
                    self.skipped.append(f"{kind} {policy}: {str(error)[:200]}")
                    print(f"  skipped: {self.skipped[-1]}", flush=True)
                    continue
                per_s, bad = await tree_peers.closed_rate(
                    system, random.Random(seed + 1), seconds=seconds / 2, **load
                )
                rate = round(min(RATE_PER_S, per_s / 2), 1)
                with ahead_of_others(self.realtime):
                    times, failed = await tree_peers.through(
                        system, random.Random(seed), rate_per_s=rate, seconds=seconds, **load
                    )
                self.add(
                    "router", system=kind, policy=policy, rate_per_s=rate, closed_per_s=round(per_s, 1),
                    failed=failed + bad, whole_ms=times,
                )  # fmt: skip
                fleet.stop(system.process)


async def run(options: argparse.Namespace, folder: Path) -> Bench:
    """Measure everything that was asked for."""
    bench = Bench(folder, 0.1 if options.quick else 1.0, options)
    only = set(options.only.split(",")) if options.only else {"calls", "outage", "placement", "peers"}
    with ahead_of_others(options.realtime):
        if "calls" in only:
            await bench.calls()
        if "outage" in only:
            await bench.outage()
    with Fleet(folder / "logs") as fleet:
        if "placement" in only:
            await bench.placement(fleet)
        if "peers" in only:
            await bench.peers(fleet)
    return bench


def main(argv: Sequence[str]) -> int:
    """Measure and write the result file; exit status 1 when a request failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the load; writes no result file")
    parser.add_argument(
        "--only", default="", help="comma-separated: calls, outage, placement, peers; writes no file"
    )
    parser.add_argument("--policy", default="", help="of the scheduler; its default without")
    parser.add_argument("--realtime", action="store_true", help="before everybody else's processes (root)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default=str(RESULTS))
    parser.add_argument("--commit", default="", help="of this copy, where there is no repository")
    options = parser.parse_args(argv)
    begin_load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="quire-tree-") as folder:
        bench = uvloop.run(run(options, Path(folder)))
    metrics = metrics_from_samples(bench.samples)
    print(*(f"{key:46} {metrics[key]:12.3f}" for key in sorted(metrics)), sep="\n")
    if not options.quick and not options.only:
        settings = {
            "prompt_blocks": PROMPT_BLOCKS, "num_owners": NUM_OWNERS, "many_owners": MANY_OWNERS,
            "background_blocks_per_owner": BACKGROUND_BLOCKS, "rate_per_s": RATE_PER_S,
            "num_documents": NUM_DOCUMENTS, "retractions_per_s": RETRACTIONS_PER_S,
            "policies": sorted(bench.policies), "routers": tree_peers.versions(),
            "routers_skipped": bench.skipped, "load_average_before": round(begin_load, 2),
            "machine_was_shared": begin_load > 0.5, "realtime": options.realtime, "seed": options.seed,
            "usable_cpus": usable_cpus(),
        }  # fmt: skip
        path = write_result(
            NAME,
            claim=CLAIM,
            command=shlex.join(["python", "-m", "loadtest.bench_prompt_tree", *argv]),
            settings=settings,
            metrics=metrics,
            samples=bench.samples,
            folder=Path(options.out),
            commit=options.commit,
        )
        print(f"wrote {path}")
    return 1 if metrics.get("failed_requests") else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
