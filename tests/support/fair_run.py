"""Real engines in fair slices and in order of arrival: `python -m tests.support.fair_run MODEL SOCKET CASES OUT MORE
[POLICY ...]`.

vLLM is imported once; two engines with four slots are forked from here one after the other, on one mempool: "fcfs" and
"cfs", or those named, with the worker settings MORE (JSON) besides. Each is asked all cases at once, "cfs" then once
more among requests whose clients leave. OUT gets, by policy, {"crowd", "counts", "reported", "served", "leases", and of
the second time "again", "counts_again"}.
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

SLOTS = 4
SLICE_STEPS = 4
MOST_POLLS = 1_200


def run_engine(
    model: str, socket: str, policy: str, more: dict[str, Any], cases: list[dict[str, Any]], out: Path
) -> None:
    """All cases at once; in slices, once more."""
    changes = {"max_num_seqs": SLOTS, "local_policy": policy, "fair_slice_steps": SLICE_STEPS, **more}
    driver = Driver(settings(model, socket, policy, **changes))

    async def run() -> None:
        await driver.start()
        crowd = await driver.crowd(cases)
        core = driver.engine._llm.engine_core
        counts = await core.call_utility_async("quire_fair_counts")
        for _ in range(MOST_POLLS):  # the front asks once a second
            if sum(driver.engine.load().served_tokens.values()) >= counts.get("computed_tokens", 0):
                break
            await asyncio.sleep(0.05)
        reported = driver.engine.load()
        again = await driver.round(cases) if policy == "cfs" else None
        found = {
            "crowd": crowd, "again": again, "counts": counts,
            "counts_again": await core.call_utility_async("quire_fair_counts"),
            "leases": driver.pages.num_leases,
            "reported": [reported.num_preempted, reported.num_kept_tokens, reported.num_recomputed_tokens],
            "served": sum(reported.served_tokens.values()),
        }  # fmt: skip
        await driver.close()
        write_whole(out, found)

    asyncio.run(run())


def main() -> None:
    """See the module's docstring."""
    model, socket, cases_path, out_path, more = sys.argv[1:6]
    cases = json.loads(Path(cases_path).read_text())
    found = {}
    for policy in sys.argv[6:] or ("fcfs", "cfs"):
        part = Path(out_path).parent / f"{policy}.json"
        words = (model, socket, policy, json.loads(more), cases, part)
        work = forked(lambda words=words: run_engine(*words))
        assert ended(work) == 0, policy
        found[policy] = json.loads(part.read_text())
    Path(out_path).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
