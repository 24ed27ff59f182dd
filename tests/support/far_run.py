"""Prompts longer than a real engine's memory: `python -m tests.support.far_run MODEL SOCKET CASES OUT MORE`.

vLLM is imported once; stock vLLM and an engine with far places are forked from here. The engine, with the worker
settings MORE (JSON) besides, says "ready" on standard output, waits for a line, and is asked all cases one after
another, then all at once. OUT gets {"stock", "alone", "crowd" (answers), "counts", "fair" (counts), "leases"}.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from tests.support.pressure_run import (
    Driver,
    ended,
    forked,
    settings,
    write_whole,
)  # first: it prepares for vLLM
from tests.support.stock_reference import run_cases


def run_engine(model: str, socket: str, more: dict[str, Any], cases: list[dict[str, Any]], out: Path) -> None:
    """See the module's docstring."""
    driver = Driver(settings(model, socket, "far", **more))

    async def run() -> None:
        await driver.start()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        alone = {}
        for case in cases:
            alone |= await driver.crowd([case])
        core = driver.engine._llm.engine_core
        crowd = await driver.crowd(cases)
        counts = await core.call_utility_async("quire_far_counts")
        fair = await core.call_utility_async("quire_fair_counts")
        leases = driver.pages.num_leases
        await driver.close()
        found = {"alone": alone, "crowd": crowd, "leases": leases}
        found |= {"counts": counts, "fair": fair}
        write_whole(out, found)

    asyncio.run(run())


def main() -> None:
    """See the module's docstring."""
    model, socket, cases_path, out_path, more = sys.argv[1:6]
    cases = json.loads(Path(cases_path).read_text())
    folder = Path(out_path).parent
    stock, far = folder / "stock.json", folder / "far.json"
    works = [
        forked(lambda: write_whole(stock, run_cases(model, cases))),
        forked(lambda: run_engine(model, socket, json.loads(more), cases, far)),
    ]
    for work in works:
        assert ended(work) == 0
    Path(out_path).write_text(
        json.dumps({"stock": json.loads(stock.read_text()), **json.loads(far.read_text())})
    )


if __name__ == "__main__":
    main()
