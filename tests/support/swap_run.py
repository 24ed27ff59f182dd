"""Real engines whose memory is short, with swap space: `python -m tests.support.swap_run MODEL SOCKET CASES OUT`.

vLLM is imported once; two engines are forked from here one after the other, each in a space of its own of one mempool:
"fcfs" and "cfs". Each is asked all cases at once, "cfs" then once more among requests whose clients leave. OUT gets, by
policy, {"crowd", "counts", "reported", "leases", and of the second time "again", "counts_again"}.
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
MAX_MODEL_LEN = 480
ANY_RATE = 1e6  # GB/s: whatever the machine does, switching pays


def run_engine(model: str, socket: str, policy: str, cases: list[dict[str, Any]], out: Path) -> None:
    """All cases at once; in slices, once more."""
    changes = {
        "max_num_seqs": SLOTS, "local_policy": policy, "fair_slice_steps": SLICE_STEPS, "kv_space": "own",
        "max_model_len": MAX_MODEL_LEN, "fair_swap_gb_per_s": ANY_RATE,
    }  # fmt: skip
    driver = Driver(settings(model, socket, policy, **changes))

    async def run() -> None:
        await driver.start()
        crowd = await driver.crowd(cases)
        core = driver.engine._llm.engine_core
        counts = await core.call_utility_async("quire_fair_counts")
        again = await driver.round(cases) if policy == "cfs" else None
        found = {
            "crowd": crowd, "again": again, "counts": counts,
            "counts_again": await core.call_utility_async("quire_fair_counts"),
            "leases": driver.pages.num_leases,
        }  # fmt: skip
        await driver.close()
        write_whole(out, found)

    asyncio.run(run())


def main() -> None:
    """See the module's docstring."""
    model, socket, cases_path, out_path = sys.argv[1:5]
    cases = json.loads(Path(cases_path).read_text())
    found = {}
    for policy in ("fcfs", "cfs"):
        part = Path(out_path).parent / f"{policy}.json"
        work = forked(lambda policy=policy, part=part: run_engine(model, socket, policy, cases, part))
        assert ended(work) == 0, policy
        found[policy] = json.loads(part.read_text())
    Path(out_path).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
