"""A vLLM engine in a mempool's pages, whose core is killed while it decodes; for bench_killed.py.

The mempool and the engine (pages_engine.py: a front, which forks the engine core) are processes of their own. The core
has the GPU's context and maps the pages.
"""

import contextlib
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

from loadtest.killed_rig import GIB, kill, ms
from loadtest.processes import Fleet, family
from shared.vmm.cuda_driver import CudaVmmDriver

ENGINE_ROUNDS = 3
ENGINE_S = 150  # what a round may take; none is begun with less time left
REQUESTS = 32
ENGINE_FLAGS = [
    "--requests", str(REQUESTS), "--prompt-tokens", "256", "--max-tokens", "4000", "--rounds", "1",
    "--kv-cache-bytes", str(32 * GIB),
]  # fmt: skip
FRESH_S = 1.0  # a step that ended so long ago says that requests decode now
LATER_S = 1.0
LEAST_BYTES = GIB  # the killed process held the weights; one that held less is the wrong one
TAIL = 3_000
GPU_FILE = "/dev/nvidia-uvm"  # who has a context has it open; NVML alone does not open it


def decodes(steps: str, now_s: float, num_requests: int = REQUESTS) -> bool:
    """Whether the recorder's last whole line (shared/engine/measured.py) is a fresh step of decoding all requests."""
    lines = steps.rpartition("\n")[0].splitlines()
    if not lines:
        return False
    end_s, _, scheduled, tokens, *_ = lines[-1].split()
    return int(scheduled) == int(tokens) == num_requests and now_s - float(end_s) < FRESH_S


def with_gpu(pids: list[int]) -> list[int]:
    """Those that have the GPU open."""
    return [pid for pid in pids if _has_open(pid, GPU_FILE)]


def _has_open(pid: int, name: str) -> bool:
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # it ended
        return False
    for link in links:
        with contextlib.suppress(OSError):  # closed while we looked
            if os.readlink(link) == name:
                return True
    return False


def engine_round(
    number: int, folder: Path, model: Path, driver: CudaVmmDriver, end_s: float
) -> dict[str, Any]:
    """Its sample. Nothing of the engine is left. Raises: StartFailed, RuntimeError, OSError, ValueError."""
    with Fleet(folder / f"engine-{number}") as fleet:
        pool, out = fleet.folder / "pool.sock", fleet.folder / "engine.json"
        ready = f"unix://{pool}"
        mempool = ["services.mempool", "--socket", str(pool), "--admin-listen", "127.0.0.1:0"]
        fleet.start("mempool", [sys.executable, "-m", *mempool], ready_url=ready)
        words = ["loadtest.pages_engine", "pages", str(model), str(out), "--mempool-socket", str(pool)]
        fleet.start(
            "engine", [sys.executable, "-m", *words, *ENGINE_FLAGS], ready_url=ready
        )  # steps say when it is
        front = fleet.pid("engine")
        _wait_until_it_decodes(front, out.with_suffix(".steps"), fleet.folder / "engine.log", end_s)
        holders = with_gpu([pid for pid in family(front) if pid != front])
        if not holders:
            raise RuntimeError("no process below the engine's front has the GPU open")
        core = holders[0]  # ancestors come first
        heirs = [pid for pid in with_gpu(family(core)) if pid != core]
        command = (
            Path(f"/proc/{core}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:80]
        )
        pidfd = os.pidfd_open(core)
        try:
            free = driver.memory_info()[0]
            begin_s, dead_s = kill(pidfd)
            held = driver.memory_info()[0] - free
        finally:
            os.close(pidfd)
        time.sleep(LATER_S)
        later = driver.memory_info()[0] - free - held
    if held + later < LEAST_BYTES:
        raise RuntimeError(f"{command.strip()!r} held {held + later} bytes: not the engine's core")
    return {
        "kind": "engine", "round": number, "dead_ms": ms(dead_s - begin_s), "held_bytes": held,
        "later_bytes": later, "heirs": len(heirs), "command": command.strip(),
    }  # fmt: skip


def _wait_until_it_decodes(front: int, steps: Path, log: Path, end_s: float) -> None:
    end_s = min(end_s, time.monotonic() + 2 * ENGINE_S)
    pidfd = os.pidfd_open(front)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    try:
        while not (steps.exists() and decodes(steps.read_text(), time.perf_counter())):
            ended = bool(poll.poll(50))
            if ended or time.monotonic() > end_s:
                what = "ended" if ended else "did not decode in time"
                raise RuntimeError(f"the engine {what}:\n{log.read_text(errors='replace')[-TAIL:]}")
    finally:
        os.close(pidfd)
