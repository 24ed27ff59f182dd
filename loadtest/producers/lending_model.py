"""A model of loadtest/producers that lends memory of its GPU, in a process of its own, for bench_producer_cost.py.

    python -m loadtest.producers.lending_model --model sdxl --batch 4 --device cuda --socket PATH --coordinator-url URL

Commands (child_commands.py): open, load (nothing), sweep, lend, window, reclaim. In a window a batch is always waiting,
and each is waited for.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from loadtest.child_commands import serve
from loadtest.producers.models import KINDS, build
from shared.aqua.lender import Lender, LenderSettings
from shared.aqua.local_memory import mempool_device
from shared.errors import Overloaded

PATIENCE_S = 60.0  # for a coordinator that has not heard of the mempool yet
DEADLINE_MS = 5_000


class Model:
    """Its methods are the commands."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._kind = KINDS[options.model]
        self._device = torch.device(options.device)

    async def open(self, most_bytes: int, page_bytes: int) -> dict[str, Any]:
        """Weights, two batches to warm up, and a connection for lending."""
        options = self._options
        self._model: Any = build(options.model, options.device)
        for _ in range(2):
            self._batch()
        self._lender = Lender(
            LenderSettings(
                options.socket, "producer", mempool_device(self._device, "producer"), most_bytes,
                coordinator_url=options.coordinator_url, page_bytes=page_bytes,
            )
        )  # fmt: skip
        return {"page_bytes": page_bytes, "unit": self._kind.unit}

    async def load(self) -> dict[str, Any]:
        """Nothing: a window brings its own."""
        return {}

    def _batch(self) -> None:
        self._kind.run(self._model, self._options.batch, self._options.steps)
        self._wait()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    async def sweep(self, batches: list[int], num_steps: int) -> dict[str, Any]:
        """Throughput and memory by batch (AQUA Figures 3, 7a), of some steps of whole items."""
        share = num_steps / self._model.shape.steps
        rows: list[dict[str, Any]] = []
        for batch in batches:
            self._kind.run(self._model, batch, num_steps)
            self._wait()
            began_s = time.perf_counter()
            self._kind.run(self._model, batch, num_steps)
            self._wait()
            rate = batch * share / (time.perf_counter() - began_s)
            rows.append({"batch": batch, "items_per_s": rate, **self._memory()})
        return {"rows": rows}

    def _memory(self) -> dict[str, int]:
        """Of the device: what the model took at most since the last time, and all there is. 0: not known of a CPU."""
        if self._device.type != "cuda":
            return {"used_bytes": 0, "total_bytes": 0}
        used = torch.cuda.max_memory_reserved(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        return {"used_bytes": used, "total_bytes": torch.cuda.mem_get_info(self._device)[1]}

    async def lend(self, num_bytes: int) -> dict[str, Any]:
        """On offer, as soon as the market knows the mempool."""
        end_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                return {"lent_bytes": await asyncio.to_thread(self._lender.lend, num_bytes)}
            except Overloaded:
                if time.monotonic() > end_s:
                    raise
                await asyncio.sleep(0.05)

    async def window(self, seconds: float) -> dict[str, Any]:
        """Batches until `seconds` are over; throughput is over the time that they took. One before it is not counted:
        lending and taking back empty torch's cache, and the first batch behind that takes many times as long.
        """
        await asyncio.to_thread(self._batch)
        began_s = time.perf_counter()
        count = 0
        while time.perf_counter() - began_s < seconds:
            await asyncio.to_thread(self._batch)
            count += 1
        took_s = time.perf_counter() - began_s
        num_steps = self._model.shape.steps
        share = (self._options.steps or num_steps) / num_steps
        return {"items": count * self._options.batch * share, "seconds": took_s, "is_warm": True}

    async def reclaim(self) -> dict[str, Any]:
        """The device has its memory again."""
        return {"seconds": await asyncio.to_thread(self._lender.reclaim, DEADLINE_MS)}


def main(argv: Sequence[str]) -> int:
    """Until the input ends."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(KINDS), required=True)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument(
        "--steps", type=int, default=0, help="of each item, in the memory of whole ones; 0: all"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--coordinator-url", required=True)
    options = parser.parse_args(argv)
    model = Model(options)
    names = ("open", "load", "sweep", "lend", "window", "reclaim")
    asyncio.run(serve({name: getattr(model, name) for name in names}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
