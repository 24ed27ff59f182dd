"""Forks the engines of bench_weave.py, one after another, from a process that has imported vLLM once.

    python -m loadtest.weave_fork cuda|cpu

Says {"ready": seconds} or {"cannot": why} in a line, then takes a job a line: {"words": of weave_engine.py, "log":
FILE, "limit_s": S}, and answers {"status": exit status, null for one that took too long, "s": seconds}. An engine and
its ranks are a session of their own, of which nothing is left when the answer comes. Ends with its input.
"""

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import time
import traceback
from typing import Any

from loadtest import weave_engine

POLL_S = 0.05
PRELOADED = (
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.multiproc_executor",
)
NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED


def why_no_fork() -> str:
    """CUDA does not survive a fork; "": nobody here has begun to use it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    context = ctypes.c_void_p()
    status = driver.cuCtxGetCurrent(ctypes.byref(context))
    return "" if status == NOT_INITIALIZED else f"importing vLLM has begun to use CUDA (status {status})"


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One engine."""
    begin = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _child(job)
    status: int | None = None
    try:
        while time.monotonic() - begin < job["limit_s"]:
            found, code = os.waitpid(pid, os.WNOHANG)
            if found:
                status = os.waitstatus_to_exitcode(code)
                break
            time.sleep(POLL_S)
    finally:
        _end(pid, is_there=status is None)
    return {"status": status, "s": round(time.monotonic() - begin, 1)}


def _child(job: dict[str, Any]) -> None:
    code = 1
    try:
        from shared.engine.vllm_setup import die_with_parent

        die_with_parent()
        os.setsid()
        with open(job["log"], "ab", buffering=0) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        code = weave_engine.main(job["words"])
    except BaseException:  # noqa: BLE001  the child of a fork ends here, whatever it was
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end(pid: int, *, is_there: bool) -> None:
    """What is left of its session: ranks outlive a leader that failed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if is_there:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def main(argv: list[str]) -> int:
    """See the module."""
    begin = time.monotonic()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    from shared.engine.vllm_setup import die_with_parent, prepare_environment

    die_with_parent()
    prepare_environment(argv[0], 1, in_pages=True)
    for name in PRELOADED:
        importlib.import_module(name)
    from shared.engine.weave_measured import preload

    preload()
    why = why_no_fork()
    answer: dict[str, Any] = {"cannot": why} if why else {"ready": round(time.monotonic() - begin, 1)}
    print(json.dumps(answer), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
