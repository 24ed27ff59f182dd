"""Step times inside vLLM's engine core: the time between two outputs that its scheduler takes in.

Installed before the core is forked from this process; the core writes one line per step to a file. A client's
view of steps also holds its own work for every token, which differs between the engines that are compared.
"""

import os
import time
from pathlib import Path
from typing import Any


def record(path: Path) -> None:
    """From now on every engine core made here appends "end_s interval_ms num_requests num_tokens" per step."""
    import vllm.v1.core.sched.scheduler as module  # here: a minute of imports for whoever only reads files

    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # noqa: TID251  vLLM's setting: a spawned core has no recorder
    stock = module.Scheduler.update_from_output
    lines: list[str] = []
    last = 0.0

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        nonlocal last
        out = stock(self, scheduler_output, model_runner_output)
        now = time.perf_counter()
        scheduled = scheduler_output.num_scheduled_tokens
        total = scheduler_output.total_num_scheduled_tokens
        lines.append(f"{now:.6f} {(now - last) * 1e3:.4f} {len(scheduled)} {total}\n")
        last = now
        if total == 0 or len(lines) >= 500:  # idle, or enough for one write
            with path.open("a") as file:
                file.writelines(lines)
            lines.clear()
        return out

    module.Scheduler.update_from_output = update_from_output


def decode_steps(path: Path, begin_s: float, end_s: float, num_requests: int) -> list[float]:
    """Intervals in ms of the steps between two moments in which all requests, and nothing else, decoded."""
    out: list[float] = []
    was_decode = False
    for line in path.read_text().splitlines() if path.exists() else ():
        end, interval_ms, requests, tokens = line.split()
        is_decode = int(requests) == int(tokens) == num_requests
        if is_decode and was_decode and begin_s < float(end) < end_s:
            out.append(float(interval_ms))
        was_decode = is_decode
    return out
