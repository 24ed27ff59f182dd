"""A rank of a woven engine is lost in a fused sum: `python -m tests.support.weave_lost_run SOCKET OUT`.

vLLM is imported once; for each fault of FAULTS an engine of two ranks in the pool's pages is forked from here, which
answers a prompt whole, and then again until it has some tokens and a rank that comes to a fused sum is killed, stopped
for good, or late. OUT gets by fault {"whole": tokens, "begun": tokens, "error", "ended_s": from the fault to the end of
the answer, "left": processes of the engine that outlived an error}.
"""

import asyncio
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.support.pressure_run import (
    Driver,
    ended,
    forked,
    settings,
)  # first: it prepares vLLM's environment

from shared.kernels.allreduce_rmsnorm import gloo  # isort: skip
from shared.engine.preload import preload_architecture  # isort: skip
from shared.kv.block_hash import chain_seed  # isort: skip
from shared.wire.requests import SamplingSpec  # isort: skip
from shared.engine.interface import EngineRequest  # isort: skip
from tests.support.weave_run import MIN_TOKENS, MODEL, OPTIONS  # isort: skip

FAULTS: dict[str, tuple[int, int]] = {  # the rank, and the signal that it sends itself; 0: it sleeps
    "killed": (1, signal.SIGKILL),
    "stopped": (1, signal.SIGSTOP),
    "first-stopped": (0, signal.SIGSTOP),
    "late": (1, 0),
}
LATE_S = 1.5
TIMEOUT_MS = 10_000  # of one exchange, in place of a minute
ANSWER_TOKENS = 120
BEGUN_TOKENS = 12
PATIENCE_S = 90.0
END_S = 20.0  # that processes have to be gone
PROMPT = [5 + n % 97 for n in range(150)]


def rank_pids() -> list[int]:
    """Of the engine's ranks, in order: they are the engine core's children, forked one after the other."""
    cores = _children(os.getpid())
    ranks = [pid for core in cores for pid in _children(core)]
    return sorted(ranks)[:2]


def _children(pid: int) -> list[int]:
    """Python processes alone: there may be resource trackers."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(word) for word in (task / "children").read_text().split()]
    return [
        child for child in found if b"resource_tracker" not in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def come_to_grief(fault: str, when: Path) -> None:
    """From now on, in ranks of engines made here: in the second sum after the file is there, before the rank adds its
    part. In the first one every rank has heard of it, and is patient no more.
    """
    victim, number = FAULTS[fault]
    stock = gloo.GlooFused.run
    num_seen = 0

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_seen
        if when.exists():
            self._timeout = timedelta(milliseconds=TIMEOUT_MS)
            num_seen += 1
            if self.rank == victim and num_seen == 2:
                if number:
                    os.kill(os.getpid(), number)
                time.sleep(LATE_S)
        return stock(self, *args, **kwargs)

    gloo.GlooFused.run = run


def lost(socket: str, out: Path, fault: str) -> None:
    when = out.with_name(f"{out.name}.now")
    come_to_grief(fault, when)
    changes: dict[str, Any] = {"weave": "full", "weave_min_tokens": MIN_TOKENS, "state_dir": str(out.parent)}
    driver = Driver(settings(str(MODEL), socket, f"lost-{fault}", **changes, **OPTIONS))

    async def run() -> dict[str, Any]:
        await driver.start()
        params = {"temperature": 0.0, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
        (whole,) = await driver.answer({"prompt": PROMPT, "params": params})
        seed = chain_seed("fingerprint", fault)  # the prompt is computed again
        request = EngineRequest("begun", "colocated", PROMPT, SamplingSpec(**params), seed)
        begun: list[int] = []
        pids = [*rank_pids(), *_children(os.getpid())]
        fault_s, error = 0.0, ""
        try:
            async with asyncio.timeout(PATIENCE_S):
                async for delta in driver.engine.generate(request):
                    begun += delta.token_ids
                    if len(begun) >= BEGUN_TOKENS and not fault_s:
                        fault_s = time.monotonic()
                        when.touch()
        except Exception as raised:  # noqa: BLE001  which one it is, is what is asked
            error = type(raised).__name__
        ended_s = time.monotonic() - fault_s
        return {"whole": whole, "begun": begun, "error": error, "ended_s": ended_s, "left": pids}

    found = asyncio.run(run())
    until_s = time.monotonic() + (END_S if found["error"] else 0.0)
    while any(map(is_running, found["left"])) and time.monotonic() < until_s:
        time.sleep(0.05)
    found["left"] = [pid for pid in found["left"] if is_running(pid)] if found["error"] else []
    out.write_text(json.dumps(found))


def main() -> None:
    """See the module's docstring."""
    socket, out = sys.argv[1], Path(sys.argv[2])
    preload_architecture(str(MODEL))
    found = {}
    for fault in FAULTS:
        part = out.with_suffix(f".{fault}")
        ended(forked(lambda fault=fault, part=part: lost(socket, part, fault)))
        found[fault] = json.loads(part.read_text())
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
