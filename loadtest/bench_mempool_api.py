"""What the mempool's calls cost, by number of blocks and by the share that is cached (MemServe, Figures 9 and 10).

    python -m loadtest.bench_mempool_api [--quick] [--no-vllm]      writes loadtest/results/mempool-api.json

The deciding code runs in this process, over the real page table, index and tiers, without sockets: MemServe measures
its library too. A block has 16 tokens, so that 256 blocks are 4K tokens. What each metric contains:

    alloc_us_per_block      a whole alloc_mem call of 256 blocks: page table, ownership, addresses
    insert_4k_ms            from received hashes to an indexed path, at the worst cached ratio
    match_4k_ms             from received hashes to the entries, two spaces asked, at the worst cached ratio
    insert_call_4k_ms, match_call_4k_ms      the whole call: addresses parsed, pages sealed, addresses answered
    hash_4k_ms, hash_seen_4k_ms              tokens to hashes, which the client does: new tokens, and seen before
    vllm_hash_4k_ms         vLLM's own prefix hash of the same tokens (its default, sha256), in a process of its own
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from loadtest.registry import ROOT
from loadtest.results import Metrics, Samples, write_result
from services.mempool.core.api import Api
from services.mempool.core.api_state import ApiAction, ApiLimits, Home, Reply
from services.mempool.core.locations import Locations
from services.mempool.core.own_pages import OwnPages
from services.mempool.core.page_table import PageTable
from services.mempool.core.radix import Index
from shared.ids import BlockHash, Epoch, InstanceId, SpaceId
from shared.kv.block_hash import chain_seed, hash_blocks, pack_tokens, split_hashes
from shared.mempool.api_hashes import HashMemory
from shared.wire import mempool_api as wire

NAME = "mempool-api"
CLAIM = (
    "On one CPU core the mempool allocates a block in at most 1 us, indexes a prompt of 4K tokens in at most 0.7 ms "
    "and finds one in at most 0.15 ms."
)
BLOCK_TOKENS = 16
SIZES = (1, 16, 64, 256, 1024)
RATIOS = (0.0, 0.5, 1.0)
NUM_PAGES = 65_536
PROMPTS_THERE = 64  # of 4K tokens, in the index before anything is measured
ROUNDS, CALLS = 7, 100
SEED = chain_seed("bench", "")
ME = InstanceId("bench")

VLLM_CODE = """
import json, sys, time
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils as kv
kv.init_none_hash(sha256)
tokens, rounds, calls = json.load(sys.stdin)
for _ in range(rounds):
    spent = []
    for _ in range(calls):
        begin, parent = time.perf_counter_ns(), None
        for at in range(0, len(tokens), 16):
            parent = kv.hash_block_tokens(sha256, parent, tuple(tokens[at : at + 16]), None)
        spent.append(time.perf_counter_ns() - begin)
    print("us", sorted(spent)[len(spent) // 2] / 1e3)
"""


def metrics_from_samples(samples: Samples) -> Metrics:
    """Medians over rounds; of insert and match the worst cached ratio."""

    def median_us(what: str, num_blocks: int, cached: float | None = None) -> float:
        found = [
            s["us"]
            for s in samples
            if (s["what"], s["blocks"]) == (what, num_blocks) and s["cached"] == cached
        ]
        return statistics.median(found)

    out = {
        "alloc_us_per_block": median_us("alloc", 256) / 256,
        "free_us_per_block": median_us("free", 256) / 256,
        "hash_4k_ms": median_us("hash", 256) / 1e3,
        "hash_seen_4k_ms": median_us("hash_seen", 256) / 1e3,
    }
    for what in ("insert", "match", "insert_call", "match_call"):
        out[f"{what}_4k_ms"] = max(median_us(what, 256, ratio) for ratio in RATIOS) / 1e3
    if any(sample["what"] == "vllm_hash" for sample in samples):
        out["vllm_hash_4k_ms"] = median_us("vllm_hash", 256) / 1e3
    return out


class Bench:
    """One pool with prompts in it. Tokens are random: no two prompts share a block unless that is meant."""

    def __init__(self) -> None:
        self.rng = Random(1)
        self.hbm = OwnPages(SpaceId(1), PageTable(NUM_PAGES, Epoch(1)), Index())
        self.dram = OwnPages(SpaceId(2), PageTable(NUM_PAGES, Epoch(1)), Index())
        self.places = Locations({self.hbm.space: self.hbm.index, self.dram.space: self.dram.index})
        self.api = Api(ApiLimits())
        self.api.add_home(Home(ME, self.places, self.hbm, self.dram, None, BLOCK_TOKENS))
        self.api.connect(1, ME)
        for _ in range(PROMPTS_THERE):
            self.insert_call(self.prompt(256))

    def tokens(self, num_blocks: int) -> bytes:
        """Packed."""
        return pack_tokens([self.rng.randrange(128_000) for _ in range(num_blocks * BLOCK_TOKENS)])

    def prompt(self, num_blocks: int, *, hashes: list[BlockHash] | None = None) -> bytes:
        """Hashes as they come from the wire; those given come first."""
        first = hashes or []
        link = first[-1] if first else SEED
        return b"".join(first + hash_blocks(link, self.tokens(num_blocks - len(first)), BLOCK_TOKENS))

    def call(self, call: wire.ApiCall) -> bytes:
        """Addresses of the answer."""
        actions: list[ApiAction] = self.api.on_call(1, call, 0)
        self.publish()
        for action in actions:
            if isinstance(action, Reply) and isinstance(action.message, wire.Addresses):
                return action.message.addresses
        return b""

    def publish(self) -> None:
        """What the shell does after every message: take the words and names that are to be written down."""
        for pages in (self.hbm, self.dram):
            pages.table.take_words()
            pages.noted.clear()

    def alloc(self, num_blocks: int) -> bytes:
        """Pages."""
        return self.call(wire.AllocMem(call_id=1, num_blocks=num_blocks, mem_type="hbm", instance=ME))

    def insert_call(self, hashes: bytes, addresses: bytes = b"") -> bytes:
        """With pages taken before, or now."""
        addresses = addresses or self.alloc(len(hashes) // 32)
        return self.call(wire.InsertBlocks(call_id=1, parent=SEED, hashes=hashes, addresses=addresses))

    def match_call(self, hashes: bytes) -> bytes:
        """Without a pin."""
        return self.call(wire.MatchBlocks(call_id=1, hashes=hashes, instance=ME))

    def delete(self, hashes: bytes) -> None:
        """Undo an insert_call."""
        self.call(wire.DeleteBlocks(call_id=1, hashes=hashes, instance=ME))

    def partly_cached(self, num_blocks: int, ratio: float) -> bytes:
        """A prompt of which so many leading blocks are in the index."""
        num_cached = int(num_blocks * ratio)
        if not num_cached:
            return self.prompt(num_blocks)
        cached = self.prompt(num_cached)
        self.insert_call(cached)
        return self.prompt(num_blocks, hashes=split_hashes(cached))


def timed(
    calls: int, prepare: Callable[[], Any], act: Callable[[Any], Any], undo: Callable[[Any], Any]
) -> float:
    """Median microseconds of act(prepare()), without prepare and undo(what act returned)."""
    spent = []
    for _ in range(calls):
        argument = prepare()
        begin = time.perf_counter_ns()
        result = act(argument)
        spent.append(time.perf_counter_ns() - begin)
        undo(result)
    return statistics.median(spent) / 1e3


def measure_memory(bench: Bench, num_blocks: int, calls: int) -> dict[str, float]:
    """alloc_mem and free_mem."""

    def free(addresses: bytes) -> None:
        bench.call(wire.FreeMem(call_id=1, addresses=addresses))

    return {
        "alloc": timed(calls, lambda: num_blocks, bench.alloc, free),
        "free": timed(calls, lambda: bench.alloc(num_blocks), free, lambda _: None),
    }


def measure_index(bench: Bench, num_blocks: int, ratio: float, calls: int) -> dict[str, float]:
    """insert and match, the index alone and the whole call."""
    out = {}
    kept: list[bytes] = []

    def new() -> bytes:
        kept.append(bench.partly_cached(num_blocks, ratio))
        return kept[-1]

    def forget(_: Any) -> None:
        bench.delete(kept.pop())

    index = bench.hbm.index

    def insert(raw: bytes) -> None:
        pages = range(num_blocks)
        index.insert_path(SEED, split_hashes(raw), pages, BLOCK_TOKENS)  # type: ignore[arg-type]

    def take_out(_: Any) -> None:
        raw = split_hashes(kept.pop())
        num_cached = int(num_blocks * ratio)
        index.delete(raw[num_cached:])  # these have no page of their own
        bench.delete(b"".join(raw[:num_cached]))

    def new_with_pages() -> tuple[bytes, bytes]:
        return new(), bench.alloc(num_blocks)

    out["insert"] = timed(calls, new, insert, take_out)
    out["insert_call"] = timed(calls, new_with_pages, lambda args: bench.insert_call(*args), forget)
    prompts = [bench.partly_cached(num_blocks, ratio) for _ in range(8)]

    def pick() -> bytes:
        return prompts[bench.rng.randrange(len(prompts))]

    out["match"] = timed(calls, pick, lambda raw: bench.places.prefix(split_hashes(raw)), lambda _: None)
    out["match_call"] = timed(calls, pick, bench.match_call, lambda _: None)
    for raw in prompts:
        bench.delete(raw)
    return out


def measure_hash(bench: Bench, num_blocks: int, calls: int) -> dict[str, float]:
    """Tokens to hashes: new ones, and ones that were seen before."""
    memory = HashMemory(BLOCK_TOKENS)
    seen = bench.tokens(num_blocks)
    memory.hashes(SEED, seen)
    return {
        "hash": timed(
            calls,
            lambda: bench.tokens(num_blocks),
            lambda raw: hash_blocks(SEED, raw, BLOCK_TOKENS),
            lambda _: None,
        ),
        "hash_seen": timed(
            calls,
            lambda: bytes(bytearray(seen)),  # equal, not the same object
            lambda raw: memory.hashes(SEED, raw),
            lambda _: None,
        ),
    }


def measure_vllm(bench: Bench, rounds: int, calls: int) -> list[dict[str, Any]]:
    """vLLM's hash of 4K tokens; nothing where vLLM is not installed."""
    tokens = [bench.rng.randrange(128_000) for _ in range(256 * BLOCK_TOKENS)]
    done = subprocess.run(
        [sys.executable, "-c", VLLM_CODE],
        input=json.dumps([tokens, rounds, calls]),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    lines = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("us ")]
    if len(lines) < rounds:
        print(f"vLLM's hash was not measured: {done.stderr[-300:]}", file=sys.stderr)
        return []
    return [_sample("vllm_hash", 256, None, number, float(us)) for number, us in enumerate(lines)]


def _sample(what: str, blocks: int, cached: float | None, number: int, us: float) -> dict[str, Any]:
    return {"what": what, "blocks": blocks, "cached": cached, "round": number, "us": round(us, 3)}


def measure(bench: Bench, rounds: int, calls: int, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Everything but vLLM."""
    samples = []
    for number in range(rounds):
        for size in sizes:
            found = measure_memory(bench, size, calls) | measure_hash(bench, size, calls)
            samples += [_sample(what, size, None, number, us) for what, us in found.items()]
            for ratio in RATIOS:
                found = measure_index(bench, size, ratio, calls)
                samples += [_sample(what, size, ratio, number, us) for what, us in found.items()]
    return samples


def main(argv: Sequence[str]) -> int:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="one short round of 4K tokens; writes no result file"
    )
    parser.add_argument(
        "--no-vllm", action="store_true", help="without vLLM's hash, which takes a while to import"
    )
    options = parser.parse_args(argv)
    rounds, calls, sizes = (1, 20, (256,)) if options.quick else (ROUNDS, CALLS, SIZES)
    bench = Bench()
    samples = measure(bench, rounds, calls, sizes)
    if not (options.quick or options.no_vllm):
        samples += measure_vllm(bench, rounds, calls)
    metrics = metrics_from_samples(samples)
    if not options.quick:
        path = write_result(
            NAME,
            claim=CLAIM,
            command=shlex.join(["python", "-m", "loadtest.bench_mempool_api", *argv]),
            settings={
                "block_tokens": BLOCK_TOKENS,
                "pages": NUM_PAGES,
                "prompts_in_index": PROMPTS_THERE,
                "rounds": rounds,
                "calls": calls,
            },
            metrics=metrics,
            samples=samples,
        )
        print(f"wrote {path.relative_to(ROOT)}")
    for key, value in sorted(metrics.items()):
        print(f"{key:24} {value:12.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
