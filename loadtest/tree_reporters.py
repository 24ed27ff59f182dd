"""Instances that only say how busy they are: `python -m loadtest.tree_reporters --endpoint ... --count 100`.

Each has a connection of its own to the scheduler, as a worker's, and reports every interval that Welcome asks for.
"""

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence

import uvloop

from shared.errors import Overloaded, PeerGone
from shared.ids import Epoch, InstanceId
from shared.kv.layout import EngineDescription
from shared.transport.zmq_channel import DealerLink
from shared.wire.cost import CostCoefficients, ModelShape
from shared.wire.reports import (
    REPORT_REPLIES,
    REPORTS,
    Hello,
    Report,
    Resync,
    Role,
    SchedulerToWorker,
    Welcome,
    WorkerToScheduler,
)

MODEL = "bench"
ROLES: tuple[Role, ...] = ("prefill", "decode", "colocated")
DESCRIPTION = EngineDescription(
    model=MODEL, fingerprint="bench", dtype="bfloat16", layout="layers-blocks", backend="none",
    block_tokens=16, block_bytes=2 << 20, max_model_len=131_072,
)  # fmt: skip
# about an 8B model on an H200: what the figures are is of no matter here, that there are some is
COST = CostCoefficients(
    shape=ModelShape(
        num_layers=32, hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8, head_dim=128,
        vocab_size=128256,
    ),
    device="mock", num_processors=132, max_batched_tokens=8192, tile_tokens=128, tile_columns=128,
    matmul_ms_per_gflop=1 / 600, memory_ms_per_gb=1 / 4, attention_ms_per_gflop=1 / 300, kv_read_ms_per_gb=1 / 3.5,
    step_overhead_ms=3.0, chunk_ms=0.05, decode_request_ms=0.01,
)  # fmt: skip


class Reporter:
    """One instance."""

    def __init__(self, endpoint: str, number: int, rng: random.Random) -> None:
        self.instance = InstanceId(f"i{number}")
        self.role: Role = ROLES[number % len(ROLES)]
        self._rng = rng
        self._seq = 0
        self._interval_s = 0.25
        self._welcomed = asyncio.Event()
        self._link: DealerLink[WorkerToScheduler, SchedulerToWorker] = DealerLink(
            endpoint, out=REPORTS, into=REPORT_REPLIES, on_message=self._on_message, on_up=self._hello
        )

    async def run(self) -> None:
        """Until it is cancelled."""
        self._link.open()
        await self._welcomed.wait()
        await asyncio.sleep(self._rng.random() * self._interval_s)
        while True:
            running = self._rng.randrange(16)
            report = Report(
                instance=self.instance, epoch=Epoch(1), seq=self._seq, num_running=running,
                unfinished_prefill_tokens=self._rng.randrange(8_192), running_context_tokens=running * 2_000,
                kv_used_share=self._rng.random() * 0.8, step_ms=12.0,
            )  # fmt: skip
            self._seq += 1
            self._send(report)
            await asyncio.sleep(self._interval_s)

    def _hello(self) -> None:
        self._send(
            Hello(
                instance=self.instance, epoch=Epoch(1), role=self.role, endpoint=f"tcp://127.0.0.1:1/{self.instance}",
                description=DESCRIPTION, max_running=256, max_batched_tokens=8_192, num_kv_blocks=50_000, cost=COST,
            )  # type: ignore[arg-type]
        )  # fmt: skip

    def _send(self, message: WorkerToScheduler) -> None:
        try:
            self._link.send(message)
        except (PeerGone, Overloaded) as error:
            print(f"{self.instance}: {error.message}", file=sys.stderr)

    def _on_message(self, seq: int, message: SchedulerToWorker, raw: list[bytes]) -> None:
        del seq, raw
        if isinstance(message, Welcome):
            self._interval_s = message.report_interval_ms / 1000
            self._welcomed.set()
        elif isinstance(message, Resync):
            self._hello()


async def run(endpoint: str, count: int) -> None:
    """All of them, until the process ends."""
    rng = random.Random(count)
    await asyncio.gather(*(Reporter(endpoint, number, rng).run() for number in range(count)))


def main(argv: Sequence[str]) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--count", type=int, default=100)
    options = parser.parse_args(argv)
    uvloop.run(run(options.endpoint, options.count))


if __name__ == "__main__":
    main(sys.argv[1:])
