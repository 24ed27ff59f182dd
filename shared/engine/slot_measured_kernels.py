"""Kernel figures of loadtest/bench_contiguous.py, in a process of its own: attention over blocks and over slots.

    python -m shared.engine.slot_measured_kernels OUT.json [--quick] [--device cpu]

Every variant is first compared with float32 arithmetic on requests of unequal lengths; one that is wrong, or fails, is
reported as such and not measured. On the CPU only the slot kernels that run there, at toy sizes: a rehearsal.
"""

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from shared.engine.slot_measured_caches import AHEAD_TOKENS, PagedCache, PlainCache, Run, Shape, SlotCache

LLAMA_8B = Shape(32, 32, 8, 128, torch.bfloat16)
TOY = Shape(2, 4, 2, 64, torch.float32)
TOLERANCE = 3e-2  # of 16-bit outputs near 1; float32 comes 1,000 times nearer
CHECK_QUERIES, CHECK_LENGTHS = [300, 1, 7], [300, 1111, 2050]
Cache = PagedCache | SlotCache
Samples = list[dict[str, Any]]


class Plan(NamedTuple):
    """What is measured."""

    prefill_tokens: list[int]
    decode_batches: list[int]
    decode_tokens: int
    num_tokens: int  # that each cache holds


def say(text: str) -> None:
    """A line for whoever runs this."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def plan_of(options: argparse.Namespace) -> Plan:
    """Full, quick or a rehearsal."""
    if options.device == "cpu":
        return Plan([256], [2], 300, 8192)
    prefill = [16384, 32768] if options.quick else [16384, 32768, 65536, 131072]
    batches = [1, 8] if options.quick else [1, 8, 16, 32]
    each = -(-(16384 + AHEAD_TOKENS) // 1024) * 1024
    return Plan(prefill, batches, 16384, max(max(prefill) + 2048, max(batches) * each))


def reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention in float32, the last query at the last key. [rows or tokens, heads, dim]."""
    group = query.shape[1] // key.shape[1]
    q, k, v = (x.float().transpose(0, 1) for x in (query, key, value))
    k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * scale
    rows, tokens = scores.shape[1:]
    allowed = torch.ones(rows, tokens, dtype=torch.bool, device=query.device).tril(tokens - rows)
    return (scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ v).transpose(0, 1)


def error_of(cache: Cache, kernel: str, *, equal: bool) -> float:
    """Largest difference from the reference, in the last layer."""
    queries, lengths = ([7, 7, 7], [2050] * 3) if equal else (CHECK_QUERIES, CHECK_LENGTHS)
    batch = cache.place(queries, lengths)
    shape, layer = cache.shape, cache.shape.num_layers - 1
    wanted: list[torch.Tensor] = []
    for number, row in enumerate(batch.spans):
        sizes = (row.tokens, shape.num_kv_heads, shape.head_dim)
        key, value = (torch.randn(sizes, device=batch.query.device).to(shape.dtype) for _ in range(2))
        cache.write(layer, number, key, value)
        wanted.append(reference(batch.query[row.begin : row.end], key, value, batch.scale))
    cache.run(kernel, batch)(layer)
    found = batch.out.float() - torch.cat(wanted)
    return float(found.abs().max()) if bool(torch.isfinite(found).all()) else float("inf")


class Clock:
    """Times in ms on the device, or on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"

    def once(self, work: Callable[[], None]) -> float:
        """One execution."""
        if not self._gpu:
            begin = time.perf_counter()
            work()
            return (time.perf_counter() - begin) * 1e3
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin_event.record()
        work()
        end_event.record()
        end_event.synchronize()
        return begin_event.elapsed_time(end_event)

    def all_layers(self, run: Run, num_layers: int, times: int) -> tuple[float, bool]:
        """(median of one pass over all layers, whether as a graph): without a graph the CPU's calls may be what
        is measured.
        """

        def layers() -> None:
            for number in range(num_layers):
                run(number)

        layers()
        work, is_graph = layers, False
        if self._gpu:
            torch.cuda.synchronize()
            try:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    layers()
                work, is_graph = graph.replay, True
            except RuntimeError as error:
                say(f"  no graph: {str(error).splitlines()[0][:120]}")
                torch.cuda.synchronize()
        work()
        return median(self.once(work) for _ in range(times)), is_graph


def measure_variant(
    name: str, kernel: str, cache: Cache, plan: Plan, clock: Clock, *, equal_only: bool
) -> Samples:
    """Samples of one kernel over one cache. Raises: what the kernel raises."""
    error = error_of(cache, kernel, equal=equal_only)
    samples: Samples = [{"part": "kernel", "variant": name, "kind": "check", "error": error}]
    if not error < TOLERANCE:
        say(f"  {name}: WRONG by {error}")
        samples[0]["error"] = str(error)
        return samples
    shape = cache.shape
    for tokens in plan.prefill_tokens:
        batch = cache.place([tokens], [tokens])
        run = cache.run(kernel, batch)
        run(0)
        repeats = 2 if tokens > 65536 else 3
        times = [clock.once(lambda i=i, run=run: run(i % shape.num_layers)) for i in range(repeats)]
        flop = 4 * shape.num_heads * shape.head_dim * tokens * tokens / 2
        sample = {"kind": "prefill", "tokens": tokens, "layer_ms": min(times), "tflop": flop / 1e12}
        samples.append({"part": "kernel", "variant": name, **sample})
    for size in plan.decode_batches:
        batch = cache.place([1] * size, [plan.decode_tokens] * size)
        all_ms, is_graph = clock.all_layers(cache.run(kernel, batch), shape.num_layers, 5)
        num_bytes = size * plan.decode_tokens * shape.token_bytes
        sample = {"kind": "decode", "batch": size, "tokens": plan.decode_tokens, "ms": all_ms}
        samples.append(
            {"part": "kernel", "variant": name, **sample, "gb": num_bytes / 1e9, "graph": is_graph}
        )
    return samples


def variants(options: argparse.Namespace, plan: Plan) -> list[tuple[str, Callable[[], Cache], list[str]]]:
    """(name, cache, kernels). Paged caches share one allocation, made by the first of them."""
    device = torch.device(options.device)
    if device.type == "cpu":

        def toy(kind: str) -> Callable[[], Cache]:
            return lambda: SlotCache(kind, TOY, plan.num_tokens, 4, 4096, device, block_tokens=32)

        return [(kind, toy(kind), ["torch_sdpa"]) for kind in ("token-major", "layer-major")]
    shape = LLAMA_8B
    held: list[torch.Tensor] = []

    def raw() -> torch.Tensor:
        if not held:
            size = plan.num_tokens * shape.token_bytes // shape.dtype.itemsize
            held.append(torch.empty(size, dtype=shape.dtype, device=device).normal_())
        return held[0]

    def slots(kind: str) -> Callable[[], Cache]:
        def make() -> Cache:
            held.clear()
            torch.cuda.empty_cache()
            begin = time.perf_counter()
            cache = SlotCache(kind, shape, plan.num_tokens, max(plan.decode_batches) + 4, 131072, device)
            cache.fill()
            torch.cuda.synchronize()
            say(f"  {kind}: made and mapped in {time.perf_counter() - begin:.1f} s")
            return cache

        return make

    def paged(block_tokens: int, *, cross_layer: bool = False) -> Callable[[], Cache]:
        return lambda: PagedCache(raw(), shape, block_tokens, cross_layer=cross_layer)

    return [
        ("plain", lambda: PlainCache(raw(), shape), ["flash3"]),
        ("paged16", paged(16), ["flash3", "triton"]),
        ("paged256", paged(256), ["flash3"]),
        ("cross-layer64", paged(64, cross_layer=True), ["flash3"]),
        ("token-major", slots("token-major"), ["flash3", "torch_flash2"]),
        ("layer-major", slots("layer-major"), ["flash3", "torch_flash2"]),
    ]


def main(argv: list[str]) -> int:
    """Exit status 0; samples and failures are in OUT.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="names of caches, e.g. token-major,layer-major")
    options = parser.parse_args(argv)
    torch.manual_seed(1)
    plan, clock = plan_of(options), Clock(torch.device(options.device))
    samples: Samples = []
    only = set(options.only.split(",")) - {""}
    for cache_name, make, kernels in variants(options, plan):
        if only and cache_name not in only:
            continue
        cache: Cache | None = None
        for kernel in kernels:
            name = f"{cache_name}.{kernel}"
            begin = time.perf_counter()
            try:
                cache = cache or make()
                equal_only = isinstance(cache, PlainCache)
                samples += measure_variant(name, kernel, cache, plan, clock, equal_only=equal_only)
            except Exception as error:  # noqa: BLE001  a kernel that fails is a result, whatever it raises
                say(traceback.format_exc()[-1500:])
                samples.append(
                    {"part": "kernel", "variant": name, "kind": "failed", "why": repr(error)[:300]}
                )
            say(f"{name}: {time.perf_counter() - begin:.1f} s")
            Path(options.out).write_text(json.dumps(samples))  # what there is survives a crash
        if cache is not None:
            cache.close()
        del cache
        gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
