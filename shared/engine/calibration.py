"""A worker's coefficients at its start: from its cluster's state folder, or from a short profile of its engine.

One worker of a kind profiles; the others of the same host wait for it and read what it wrote. Nothing here fails a
worker: without coefficients it serves as well, and the scheduler places by load and prefix.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from shared.costmodel.shapes import shape_of
from shared.engine.interface import Engine
from shared.engine.profile_run import Profiler
from shared.engine.worker_config import WorkerSettings
from shared.errors import ClusterError
from shared.kv.model_files import read_config
from shared.observe.log import get_logger
from shared.wire.codec import MALFORMED
from shared.wire.cost import CostCoefficients

_log = get_logger("worker.calibration")

VERSION = 3  # of the profile and the model: what another version found is not read
BUDGET_MS = {"cpu": 2_500.0}
GPU_BUDGET_MS = 6_000.0
TIMEOUT_FACTOR = 3  # of the budget, for all of it
USELESS_ERROR_RATIO = 0.4  # a median error above it: no model is better
KEEP_ERROR_RATIO = 0.15  # only a better one is kept for the next start
LOCK_POLL_S = 0.05
# Of one all-reduce, until it is measured: (ms each, ms a GB).
CAREFUL_ALL_REDUCE = {"cpu": (0.2, 400.0), "gpu": (0.012, 4.0)}
# Streaming multiprocessors by what a GPU's name contains; asking the driver would make a context here.
PROCESSORS = (
    ("H200", 132),
    ("H100", 132),
    ("GH200", 132),
    ("B200", 148),
    ("A100", 108),
    ("L40", 142),
    ("L4", 58),
)


def frame_of(engine: Engine, settings: WorkerSettings) -> CostCoefficients:
    """Everything of the coefficients that need not be measured. Raises: SettingsError."""
    description = engine.description
    each_ms, gb_ms = CAREFUL_ALL_REDUCE["cpu" if engine.device == "cpu" else "gpu"]
    on_gpu = next((count for name, count in PROCESSORS if name in engine.device), 108)
    return CostCoefficients(
        shape=shape_of(read_config(settings.model_dir), description.dtype),
        tp=description.tp_size,
        pp=description.pp_size,
        device=engine.device,
        num_processors=1 if engine.device == "cpu" else on_gpu,
        max_batched_tokens=engine.max_batched_tokens,
        all_reduce_ms=each_ms,
        all_reduce_ms_per_gb=gb_ms,
    )


def key_of(frame: CostCoefficients, engine: Engine, settings: WorkerSettings) -> str:
    """Equal for engines whose times are the same: model, machine and everything of the settings that changes speed."""
    description = engine.description
    is_own = settings.weave == "off" or (
        settings.weave == "auto" and (engine.device == "cpu" or settings.tensor_parallel_size == 1)
    )
    woven = () if is_own else (settings.weave, settings.weave_min_tokens, settings.weave_sms)
    parts = (
        VERSION, frame, description.fingerprint, description.dtype, description.layout, description.backend,
        description.isa, description.block_tokens, description.max_model_len, engine.max_running, settings.threads,
        engine.graph_tokens, settings.enforce_eager, settings.kv_cache, settings.mempool_socket != "",
        settings.slot_kernel, _processor_name(), os.cpu_count(), *woven,
    )  # fmt: skip
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:24]


async def calibrate(engine: Engine, settings: WorkerSettings, vocab_size: int) -> CostCoefficients | None:
    """The engine's coefficients; None when there are none, with a line in the log. Raises: nothing but cancellation."""
    if engine.known_cost is not None:
        return engine.known_cost
    if settings.calibrate == "off":
        return None
    begin = time.perf_counter()
    try:
        frame = frame_of(engine, settings)
        path = _path(frame, engine, settings)
        async with _turn(path, budget_ms(frame)):
            found = None if settings.calibrate == "always" else _read(path)
            if found is not None:
                _log.info("calibration_read", path=str(path), **_said(found))
                return found
            found = await _measure(engine, frame, vocab_size)
            took_ms = (time.perf_counter() - begin) * 1e3
            found = msgspec.structs.replace(found, calibration_ms=round(took_ms, 1))
            if found.median_error_ratio > USELESS_ERROR_RATIO:
                _log.warning("calibration_useless", **_said(found))
                return None
            if found.median_error_ratio <= KEEP_ERROR_RATIO:
                _write(path, found)
            _log.info("calibrated", **_said(found))
            return found
    except Exception as error:  # noqa: BLE001  a model of costs is no reason to fail a worker
        reason = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        _log.warning("calibration_failed", error=f"{type(reason).__name__}: {reason}")
        return None


def budget_ms(frame: CostCoefficients) -> float:
    """How long the profile may take."""
    return BUDGET_MS.get(frame.device, GPU_BUDGET_MS)


async def _measure(engine: Engine, frame: CostCoefficients, vocab_size: int) -> CostCoefficients:
    profiler = Profiler(engine, vocab_size, seed=int.from_bytes(os.urandom(4), "big"))
    limit_s = TIMEOUT_FACTOR * budget_ms(frame) / 1e3
    try:
        async with asyncio.timeout(limit_s):
            seen = await profiler.run_plan(budget_ms(frame))
    except TimeoutError:
        raise ClusterError(f"the profile did not end in {limit_s:.0f} s") from None
    finally:
        if not await profiler.clear():
            _log.warning("calibration_left_blocks")
    from shared.costmodel.fit import fit  # with numpy, which a worker that reads a kept profile does not need

    # a second: heartbeats go on
    return await asyncio.to_thread(fit, frame, seen, graph_tokens=engine.graph_tokens)


# -- what is kept ---------------------------------------------------------------------------------------


def _path(frame: CostCoefficients, engine: Engine, settings: WorkerSettings) -> Path | None:
    if not settings.state_dir:
        return None
    return Path(settings.state_dir, f"cost-{key_of(frame, engine, settings)}.json")


def _read(path: Path | None) -> CostCoefficients | None:
    if path is None or not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=CostCoefficients)
    except (OSError, *MALFORMED) as error:
        _log.warning("calibration_unreadable", path=str(path), error=str(error))
        return None


def _write(path: Path | None, found: CostCoefficients) -> None:
    if path is None:
        return
    part = path.with_suffix(f".{os.getpid()}")
    try:
        part.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2))
        part.replace(path)
    except OSError as error:
        _log.warning("calibration_not_kept", path=str(path), error=error.strerror)


@contextlib.asynccontextmanager
async def _turn(path: Path | None, wait_ms: float) -> AsyncIterator[None]:
    """One worker of a kind at a time, for as long as another's profile may take; then without waiting further."""
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.perf_counter() + TIMEOUT_FACTOR * wait_ms / 1e3
        while time.perf_counter() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)  # ends the lock


def _said(found: CostCoefficients) -> dict[str, object]:
    return {
        "device": found.device,
        "samples": found.num_samples,
        "median_error_ratio": round(found.median_error_ratio, 4),
        "p90_error_ratio": round(found.p90_error_ratio, 4),
        "took_ms": found.calibration_ms,
    }


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
