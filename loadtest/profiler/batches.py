"""The profiler's second mode: any callable that runs one batch, such as an image model in PyTorch (AQUA 4, Figure 3).

The batch is doubled until throughput saturates; a model lends what is free on its device at that point. It never
borrows: nothing of it waits for memory.
"""

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from loadtest.profiler.core.profile import Profile, Settings, label, size_text
from loadtest.profiler.core.sweep import BatchPoint, BatchSweep, SweepLimits
from loadtest.profiler.runner import Told
from shared.engine.device_memory import DeviceMemory, open_device
from shared.errors import SettingsError

Work = Callable[[int], object]  # runs one batch of that size
WARM_UP, ROUNDS = 1, 3  # calls of each batch; the median of the latter counts
LEAST_S = 1e-6


def load(name: str) -> Work:
    """MODULE:FUNCTION, where the working directory's modules are found too. Raises: SettingsError."""
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise SettingsError(
            f"--callable {name}: expected MODULE:FUNCTION, such as my_models.diffusion:one_batch"
        )
    _refuse_path(name, module_name, attribute)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        raise SettingsError(f"--callable {name}: {error}") from error
    except (ImportError, SyntaxError) as error:  # the module's own mistake
        raise SettingsError(f"--callable {name}: {module_name} cannot be imported: {error}") from error
    except AttributeError as error:
        raise SettingsError(f"--callable {name}: {error}") from error
    if not callable(found):
        raise SettingsError(f"--callable {name}: it is no function but a {type(found).__name__}")
    return found


def _refuse_path(name: str, module_name: str, attribute: str) -> None:
    """Raises: SettingsError, with what to write, on ./models/mm.py, which importlib takes for something else."""
    parts = module_name.removesuffix(".py").replace("/", ".").split(".")
    dotted = ".".join(part for part in parts if part) or "my_models.diffusion"
    if dotted != module_name:
        raise SettingsError(f"--callable {name}: give the module's dotted name, such as {dotted}:{attribute}")


def profile_callable(
    name: str,
    settings: Settings,
    *,
    most: int,
    gain: float = 0.05,
    device: str = "",
    tell: Told = lambda text: None,
    machine: dict[str, Any] | None = None,
) -> Profile:
    """Load and sweep. Raises: SettingsError; what the callable raises, other than that it found no room."""
    limits, work = SweepLimits(gain, most), load(name)
    memory = open_device(device)
    sweep = sweep_batches(work, memory, limits, tell)
    peak = sweep.peak()
    role, bytes_per_gpu = label(peak.free_bytes, 0, settings.threshold_bytes)
    return Profile(
        model=name,
        tp=1,
        role=role,
        bytes_per_gpu=bytes_per_gpu,
        stable_rate_per_s=round(peak.items_per_s, 6),
        pool_bytes=memory.total_bytes,
        peak_kv_bytes=peak.used_bytes,
        free_bytes=peak.free_bytes,
        reason=f"throughput peaks at a batch of {peak.batch}: {sweep.reason}",
        source=f"batches of {name} on {memory.name}",
        settings=msgspec.to_builtins(settings),
        machine=machine or {},
        batches=[msgspec.to_builtins(point) for point in sweep.points],
    )


def sweep_batches(work: Work, memory: DeviceMemory, limits: SweepLimits, tell: Told) -> BatchSweep:
    """Run batch after batch."""
    sweep = BatchSweep(limits)
    while (batch := sweep.next_batch()) is not None:
        try:
            point = _measure(work, memory, batch)
        except (RuntimeError, MemoryError) as error:
            if not memory.found_no_room(error):
                raise
            sweep.out_of_memory(batch)
            tell(f"batch {batch}: no room")
            continue
        sweep.record(point)
        tell(
            f"batch {batch}: {point.items_per_s:.2f}/s, {size_text(point.used_bytes)} used, "
            f"{size_text(point.free_bytes)} free"
        )
    return sweep


def _measure(work: Work, memory: DeviceMemory, batch: int) -> BatchPoint:
    memory.begin()
    times_s = []
    for _ in range(WARM_UP + ROUNDS):
        begin_s = time.perf_counter()
        work(batch)
        memory.wait()
        times_s.append(time.perf_counter() - begin_s)
    used_bytes, free_bytes = memory.peak()
    return BatchPoint(batch, batch / max(LEAST_S, median(times_s[WARM_UP:])), used_bytes, free_bytes)
