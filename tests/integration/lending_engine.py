"""An engine process for tests: python -m tests.integration.lending_engine SOCKET lend|borrow [BLOCK_BYTES].

It works in pages of a space of its own and reports its load. `lend` is idle; `borrow` has a long queue and reads and
computes prompts for ever, comparing every byte: one that is wrong ends it with status 1. Each turn is a line on stdout.
BLOCK_BYTES: of another model's blocks, for a lender to real engines.
"""

import asyncio
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from shared.ids import Epoch
from shared.wire.mempool_lending import ReportLoad
from tests.integration.mempool_rig import DESCRIPTION, MempoolProcess
from tests.integration.test_mempool_lending import PROMPTS, Engine

REPORT_S = 0.01


async def report(engine: Engine, waiting: int) -> None:
    while True:
        engine.client.report_load(ReportLoad(instance_epoch=Epoch(1), model=engine.name, num_waiting=waiting))
        engine.answer()
        await asyncio.sleep(REPORT_S)


async def run(socket: str, job: str, block_bytes: int = 0) -> None:
    at: Any = SimpleNamespace(socket=Path(socket))
    model = DESCRIPTION
    if block_bytes:
        model = msgspec.structs.replace(model, model="other", fingerprint="g", block_bytes=block_bytes)
    engine = Engine(cast(MempoolProcess, at), {"lend": "producer", "borrow": "consumer"}[job], model)
    engine.client.start()
    assert await engine.client.wait_connected(30_000)
    told = asyncio.ensure_future(report(engine, 99 if job == "borrow" else 0))
    chance = random.Random(7)
    while not told.done():
        print("turn", flush=True)
        if job == "lend":
            await asyncio.sleep(REPORT_S)
            continue
        hashes = chance.choice(PROMPTS)
        if await engine.acquired(hashes) < len(hashes):
            await engine.compute(hashes)


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 0))
