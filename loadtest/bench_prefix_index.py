"""Quire's radix index beside vLLM's block-hash prefix cache, by prompt length and cache size (MemServe, Figure 10).

    python -m loadtest.bench_prefix_index [--quick]      writes loadtest/results/prefix-index.json

One process, one thread, no engine: tokens in, what is cached of them out. A block has 16 tokens. vLLM's side is its own
hasher, look-up and block pool (shared/engine/measured_prefix.py). Both take turns on the same prompts, which are new
(nothing of them cached), and then inserted. What is timed, per prompt:

    hash        tokens to block hashes (both SHA-256, chained)      hash_seen   the same tokens again, by their memory
    match_new   look up a prompt of which nothing is cached         match       the same once all of it is cached
    insert      name the blocks of a prompt; pages and blocks are there before

A metric named check is hash + match_new: what a prefill waits for when nothing is cached, MemServe's "check index".
The paper's vLLM is 0.4; the one measured here is 0.26, whose hash cache was rewritten since.
"""

import argparse
import gc
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Protocol

from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, write_result
from services.mempool.core.radix import Index
from shared.ids import BlockHash, PageId
from shared.kv.block_hash import chain_seed, hash_blocks, pack_tokens
from shared.mempool.api_hashes import HashMemory

NAME = "prefix-index"
CLAIM = (
    "To look for a prompt of 4K to 32K tokens, and to index it, the mempool's radix index needs no more time than vLLM "
    "0.26's block-hash prefix cache, hashing included, at 1 thousand to 256 thousand cached blocks."
)
BLOCK_TOKENS = 16
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)  # tokens
CACHES = (1 << 10, 1 << 14, 1 << 16, 1 << 18)  # blocks that are cached before
PATH_BLOCKS = 256  # of the prompts that fill the cache
ROUNDS, CALLS = 5, 15
STEPS = ("hash", "match_new", "insert", "match")


class PrefixCache(Protocol):
    """What is measured. A prompt is whatever the cache wants it to be."""

    name: str

    def __len__(self) -> int: ...
    def prompt(self, tokens: Sequence[int]) -> Any: ...
    def with_hashes(self, hashes: Sequence[bytes]) -> Any: ...
    def hash(self, prompt: Any) -> None: ...
    def match(self, prompt: Any) -> int: ...
    def blocks(self, prompt: Any) -> Any: ...
    def insert(self, prompt: Any, blocks: Any) -> None: ...
    def forget(self, prompt: Any, blocks: Any) -> None: ...


class Prompt:
    """As the mempool's client has it: packed tokens, then hashes."""

    def __init__(self, tokens: bytes, hashes: list[BlockHash]) -> None:
        self.tokens = tokens
        self.hashes = hashes


class RadixCache:
    """The mempool's index over pages that nobody writes."""

    name = "quire"

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._seed = chain_seed("bench", "")
        self._index = Index()
        self._free = [PageId(page) for page in range(num_blocks)]
        self.memory = HashMemory(block_tokens)

    def __len__(self) -> int:
        return len(self._index)

    def prompt(self, tokens: Sequence[int]) -> Prompt:
        """Not hashed yet."""
        return Prompt(pack_tokens(list(tokens)), [])

    def with_hashes(self, hashes: Sequence[bytes]) -> Prompt:
        """Of other blocks than any tokens'."""
        return Prompt(b"", [BlockHash(h) for h in hashes])

    def hash(self, prompt: Prompt) -> None:
        """Of all its full blocks."""
        prompt.hashes = hash_blocks(self._seed, prompt.tokens, self._block_tokens)

    def match(self, prompt: Prompt) -> int:
        """Number of its leading blocks that are indexed."""
        return len(self._index.prefix(prompt.hashes))

    def blocks(self, prompt: Prompt) -> list[PageId]:
        """Pages for all of it."""
        pages = self._free[-len(prompt.hashes) :]
        del self._free[-len(prompt.hashes) :]
        return pages

    def insert(self, prompt: Prompt, blocks: list[PageId]) -> None:
        """Name the pages."""
        self._index.insert_path(self._seed, prompt.hashes, blocks, self._block_tokens)

    def forget(self, prompt: Prompt, blocks: list[PageId]) -> None:
        """Unname and free them."""
        self._index.delete(prompt.hashes)
        self._free += blocks


def metrics_from_samples(samples: Samples) -> Metrics:
    """Medians over rounds, the worst cache size; `of_vllm`: our time over vLLM's, the worst length from 4K on too."""
    found = medians(samples)
    sizes = sorted({key[3] for key in found})
    lengths = sorted({key[2] for key in found})

    def us(name: str, steps: Sequence[str], tokens: int, blocks: int) -> float:
        return sum(found[name, step, tokens, blocks] for step in steps)

    sums = {"check": ("hash", "match_new"), "match": ("match",), "insert": ("insert",)}
    out: Metrics = {}
    for tokens in (length for length in lengths if length in (4096, 32768)):
        for what, steps in sums.items():
            for name in ("quire", "vllm"):
                worst = max(us(name, steps, tokens, blocks) for blocks in sizes)
                out[f"{name}_{what}_{tokens // 1024}k_ms"] = worst / 1e3
        out[f"quire_hash_seen_{tokens // 1024}k_ms"] = (
            max(us("quire", ("hash_seen",), tokens, blocks) for blocks in sizes) / 1e3
        )
    for what, steps in sums.items():
        out[f"{what}_of_vllm_ratio"] = max(
            us("quire", steps, tokens, blocks) / us("vllm", steps, tokens, blocks)
            for tokens in lengths
            if tokens >= 4096
            for blocks in sizes
        )
    return out


def medians(samples: Samples) -> dict[tuple[str, str, int, int], float]:
    """(cache, step, tokens, cached blocks) -> microseconds, the median of the rounds."""
    groups: dict[tuple[str, str, int, int], list[float]] = {}
    for row in samples:
        groups.setdefault((row["cache"], row["step"], row["tokens"], row["blocks"]), []).append(row["us"])
    return {key: median(values) for key, values in groups.items()}


def fill(cache: PrefixCache, num_blocks: int, rng: Random) -> None:
    """So many blocks of prompts that have nothing in common, on top of what is there."""
    while len(cache) < num_blocks:
        hashes = [rng.randbytes(32) for _ in range(min(PATH_BLOCKS, num_blocks - len(cache)))]
        prompt = cache.with_hashes(hashes)
        cache.insert(prompt, cache.blocks(prompt))


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """(microseconds, what work returned)."""
    begin = time.perf_counter_ns()
    result = work()
    return (time.perf_counter_ns() - begin) / 1e3, result


def one_prompt(cache: PrefixCache, tokens: list[int]) -> dict[str, float]:
    """Times of the steps; the cache is as full afterwards as before. Raises: RuntimeError on a wrong answer."""
    out: dict[str, float] = {}
    prompt = cache.prompt(tokens)
    out["hash"], _ = timed(lambda: cache.hash(prompt))
    out["match_new"], nothing = timed(lambda: cache.match(prompt))
    blocks = cache.blocks(prompt)
    out["insert"], _ = timed(lambda: cache.insert(prompt, blocks))
    out["match"], everything = timed(lambda: cache.match(prompt))
    if (nothing, everything) != (0, len(tokens) // BLOCK_TOKENS):
        raise RuntimeError(
            f"{cache.name} found {nothing} and {everything} of {len(tokens) // BLOCK_TOKENS} blocks"
        )
    cache.forget(prompt, blocks)
    if isinstance(cache, RadixCache):
        packed = bytes(bytearray(prompt.tokens))  # equal, not the same object
        cache.memory.hashes(chain_seed("bench", ""), prompt.tokens)
        out["hash_seen"], _ = timed(lambda: cache.memory.hashes(chain_seed("bench", ""), packed))
    return out


def measure(
    caches: Sequence[PrefixCache],
    sizes: Sequence[int],
    lengths: Sequence[int],
    rounds: int,
    calls: int,
) -> list[dict[str, Any]]:
    """One sample per cache, step, length, size and round: the median of `calls` prompts, the caches taking turns."""
    rng = Random(1)
    samples: list[dict[str, Any]] = []
    for num_blocks in sizes:
        for cache in caches:
            fill(cache, num_blocks, rng)
        gc.collect()
        gc.freeze()  # as vLLM does once it has started: what is there is not walked again
        for number in range(rounds):
            for length in lengths:
                spent: dict[tuple[str, str], list[float]] = {}
                for call in range(calls):
                    tokens = [rng.randrange(128_000) for _ in range(length)]
                    for cache in caches if call % 2 else list(reversed(caches)):
                        for step, us in one_prompt(cache, tokens).items():
                            spent.setdefault((cache.name, step), []).append(us)
                for (name, step), values in spent.items():
                    row = {"cache": name, "step": step, "tokens": length, "blocks": num_blocks}
                    samples.append(row | {"round": number, "us": round(median(values), 3)})
        gc.unfreeze()
        print(f"{num_blocks} cached blocks: done", flush=True)
    return samples


def show(samples: Samples) -> None:
    """Microseconds: check and insert and match by length and size."""
    found = medians(samples)
    print(f"{'blocks':>8} {'tokens':>7} " + " ".join(f"{step:>20}" for step in STEPS) + "   us, quire / vllm")
    for num_blocks, length in sorted({(key[3], key[2]) for key in found}):
        pairs = [[found[name, step, length, num_blocks] for name in ("quire", "vllm")] for step in STEPS]
        print(
            f"{num_blocks:>8} {length:>7} "
            + " ".join(f"{ours:9.0f} /{theirs:9.0f}" for ours, theirs in pairs)
        )


def main(argv: Sequence[str]) -> int:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round, two sizes; writes no result file")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    from shared.engine.measured_prefix import VllmPrefixCache

    sizes = CACHES[:2] if options.quick else CACHES
    rounds, calls = (1, 5) if options.quick else (ROUNDS, CALLS)
    room = max(sizes) + max(LENGTHS) // BLOCK_TOKENS
    caches: list[PrefixCache] = [RadixCache(room, BLOCK_TOKENS), VllmPrefixCache(room, BLOCK_TOKENS)]
    samples = measure(caches, sizes, LENGTHS, rounds, calls)
    metrics = metrics_from_samples(samples)
    if not options.quick:
        path = write_result(
            NAME,
            claim=CLAIM,
            command=shlex.join(["python", "-m", "loadtest.bench_prefix_index", *argv]),
            settings={
                "block_tokens": BLOCK_TOKENS,
                "rounds": rounds,
                "calls": calls,
                "hash": "sha256, vLLM's default",
            },
            metrics=metrics,
            samples=samples,
            folder=options.out,
        )
        print(f"wrote {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    show(samples)
    for key, value in sorted(metrics.items()):
        print(f"{key:28} {value:10.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
