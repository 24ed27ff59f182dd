"""What mapping pages costs a step, on its path and in the background, and what a slot's leftover pages save.

    python -m loadtest.bench_slot_mapping [--quick]                  writes loadtest/results/slot-mapping.json
    python -m loadtest.bench_slot_mapping --device cuda [--quick]    writes loadtest/results/h200-slot-mapping.json

vAttention's Figures 12 and 13 without a model: request slots (shared/vmm/kv_slots.py) over pages, 8B shape, every
mapping a real one. Host: pages of a memfd, mapped by mmap; the model's own work is a pause. GPU: CUDA pages; the model
is 5 ms of memory traffic that is still running when step() is called.

decode    32 requests of 2K to 3K tokens grow by one a step; step() is timed. "background": mapped ahead by the
          mapper; "on the path": with nothing mapped ahead. On the host the thread's CPU time counts, for other
          processes use the same cores; on a GPU the wall time.
prefill   the first step() of a prompt of 16K tokens. "fresh": the slot is empty; "leftover": a request of that length
          ended in it (deferred reclamation); "scattered": fresh, of pages that do not lie side by side.

Layouts: token-major pages of 8 MiB (64 tokens, all layers) and layer-major groups of 64 pages of 2 MiB (1,024 tokens).
"""

import argparse
import importlib
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, quantile, write_result
from shared.vmm.cuda_driver import CudaVmmDriver
from shared.vmm.cuda_pages import CudaPages
from shared.vmm.errors import VmmUnavailable
from shared.vmm.geometry import KvShape
from shared.vmm.interface import PageSource
from shared.vmm.kv_layouts import KvLayout, layer_major, token_major
from shared.vmm.kv_slots import KvSlots
from shared.vmm.memfd_pages import MemfdPages

NAME = "slot-mapping"
CLAIM = (
    "With mapping in the background no decode step of 32 growing requests makes a mapping call on its path, and a "
    "prompt of 16K tokens in a slot with an ended request's pages maps nothing either."
)
GPU_NAME = "h200-slot-mapping"
GIB = 1 << 30
LLAMA_8B = KvShape(32, 8, 128)
LAYOUTS = {"token-major": token_major, "layer-major": layer_major}
REQUESTS, DECODE_STEPS, MODEL_S = 32, 600, 0.005
PROMPT_TOKENS = 16_384
WAYS = {"background": (8, 4), "on the path": (0, 0)}  # ahead_tokens, eager_pages


def metrics_from_samples(samples: Samples) -> Metrics:
    """Of decode: p50, p99 and worst step() of all rounds in us. Of prefill: the median first step() in us."""
    out: Metrics = {}
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row in samples:
        groups.setdefault((row["kind"], row["layout"], row["way"]), []).extend(row["us"])
    for (kind, layout, way), us in groups.items():
        name = f"{kind}_{layout}_{way}".replace(" ", "_").replace("-", "_")
        if kind == "decode":
            out[f"{name}_p50_us"] = quantile(us, 0.5)
            out[f"{name}_p99_us"] = quantile(us, 0.99)
            out[f"{name}_max_us"] = max(us)
        else:
            out[f"{name}_us"] = median(us)
    for layout in {key[1] for key in groups}:
        flat = layout.replace("-", "_")
        both = [out.get(f"decode_{flat}_{way}_p99_us") for way in ("background", "on_the_path")]
        if both[0] is not None and both[1]:
            out[f"decode_{flat}_p99_ratio"] = both[0] / both[1]
        counts = [row for row in samples if (row["kind"], row["layout"]) == ("decode", layout)]
        for way in WAYS:
            mine = [row["inline_ops"] for row in counts if row["way"] == way]
            out[f"decode_{flat}_{way.replace(' ', '_')}_inline_count"] = float(max(mine, default=0))
    return out


class Host:
    """Pages of a memfd; a pause for the model."""

    clock = staticmethod(time.thread_time_ns)

    def pages(self, count: int, page_bytes: int) -> PageSource:
        """The caller closes them."""
        return MemfdPages(count, page_bytes)

    def model(self) -> None:
        """One step's work."""
        time.sleep(MODEL_S)

    def close(self) -> None:
        """Nothing is left."""


class Gpu:
    """CUDA pages; memory traffic for the model, which step() finds still running. Raises: VmmUnavailable."""

    clock = staticmethod(time.perf_counter_ns)

    def __init__(self) -> None:
        self._vmm = CudaVmmDriver(0)
        self._driver: Any = importlib.import_module("cuda.bindings.driver")
        self._busy = CudaPages(self._vmm, 1, GIB)
        self._window = self._busy.window(1)
        self._window.map(0, 0)

    def pages(self, count: int, page_bytes: int) -> PageSource:
        """The caller closes them."""
        return CudaPages(self._vmm, count, page_bytes)

    def model(self) -> None:
        """Wait for the step before, start the next one's work: 1 GiB takes about 0.3 ms."""
        self._driver.cuStreamSynchronize(0)
        for _ in range(int(MODEL_S / 0.0003)):
            self._driver.cuMemsetD32Async(self._window.address, 7, GIB // 4, 0)

    def close(self) -> None:
        """Free the memory."""
        self._driver.cuStreamSynchronize(0)
        self._window.close()
        self._busy.close()


def slots_of(
    rig: "Host | Gpu", layout: KvLayout, num_pages: int, way: str, *, scattered: bool = False
) -> tuple[KvSlots, PageSource]:
    """Over so many block pages; the caller closes both."""
    source = rig.pages(num_pages * layout.num_tensors, layout.geometry.page_bytes)
    order = list(
        range(num_pages - 1, -1, -1)
    )  # taken from its end: pages that follow each other, one call a run
    if scattered:
        Random(5).shuffle(order)
    ahead, eager = WAYS[way]
    return KvSlots(
        layout, source, pages=order, ahead_tokens=ahead, eager_pages=eager, reclaim_ratio=0.0
    ), source


def decode(rig: "Host | Gpu", name: str, way: str, steps: int, seed: int) -> dict[str, Any]:
    """One sample: step() of every decode iteration."""
    rng = Random(seed)
    longest = 3072 + steps + 1
    layout = LAYOUTS[name](LLAMA_8B, REQUESTS, longest)
    slots, source = slots_of(rig, layout, REQUESTS * layout.slot_pages, way, scattered=True)
    lens = [0] * REQUESTS
    for _ in range(REQUESTS):
        reqid = slots.alloc_reqid()
        assert reqid is not None
        lens[reqid] = rng.randrange(2048, 3072)
    slots.step(lens)
    slots.drain()
    inline, spent = slots.counters.inline_ops, []
    for _ in range(steps):
        lens = [tokens + 1 for tokens in lens]
        begin = rig.clock()
        if not slots.step(lens):
            raise RuntimeError("a decode step found no page")
        spent.append(round((rig.clock() - begin) / 1e3, 1))
        rig.model()
    inline = slots.counters.inline_ops - inline
    slots.close()
    source.close()
    return {"kind": "decode", "layout": name, "way": way, "us": spent, "inline_ops": inline}


def prefill(rig: "Host | Gpu", name: str, way: str, repeats: int) -> dict[str, Any]:
    """One sample: the first step() of a prompt, several times."""
    layout = LAYOUTS[name](LLAMA_8B, 2, PROMPT_TOKENS)
    spent = []
    for _ in range(repeats):
        slots, source = slots_of(
            rig, layout, 2 * layout.slot_pages, "on the path", scattered=way == "scattered"
        )
        if way == "leftover":
            first = slots.alloc_reqid((), PROMPT_TOKENS)
            assert first is not None
            slots.step([PROMPT_TOKENS if reqid == first else 0 for reqid in range(2)])
            slots.free_reqid(first)
            slots.drain()
        reqid = slots.alloc_reqid((), PROMPT_TOKENS)
        lens = [PROMPT_TOKENS if number == reqid else 0 for number in range(2)]
        begin = rig.clock()
        if not slots.step(lens):
            raise RuntimeError("a prompt found no pages")
        spent.append(round((rig.clock() - begin) / 1e3, 1))
        slots.drain()
        slots.close()
        source.close()
    return {"kind": "prefill", "layout": name, "way": way, "us": spent, "inline_ops": 0}


def main(argv: Sequence[str]) -> int:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps; writes no result file")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--commit", default="", help="of these files, on a machine without the repository")
    options = parser.parse_args(argv)
    try:
        rig = Host() if options.device == "cpu" else Gpu()
    except VmmUnavailable as error:
        print(f"nothing to measure here: {error.message}")
        return 2
    steps, rounds, repeats = (60, 1, 3) if options.quick else (DECODE_STEPS, 3, 11)
    samples = [
        decode(rig, layout, way, steps, seed) for seed in range(rounds) for layout in LAYOUTS for way in WAYS
    ]
    samples += [
        prefill(rig, layout, way, repeats) for layout in LAYOUTS for way in ("fresh", "scattered", "leftover")
    ]
    rig.close()
    metrics = metrics_from_samples(samples)
    if not options.quick:
        path = write_result(
            NAME if options.device == "cpu" else GPU_NAME,
            claim=CLAIM,
            command=shlex.join(["python", "-m", "loadtest.bench_slot_mapping", *argv]),
            settings={"requests": REQUESTS, "steps": steps, "rounds": rounds, "model_ms": MODEL_S * 1e3},
            metrics=metrics,
            samples=samples,
            folder=options.out,
            commit=options.commit,
        )
        print(f"wrote {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    for key, value in sorted(metrics.items()):
        print(f"{key:44} {value:10.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
