"""worker.weave = auto: whether an engine's ranks fuse or weave, by a short measurement before its first start, kept.

On GPUs that reach each other over NVLink, two short-lived engines of the model's shape (weave_probe.py: a few layers,
random weights) are timed beside each other: stock vLLM as it would be, compiled, and ours. What they found lies in
`worker.state_dir` as weave-auto-KEY.json, in the format of shared/weave/threshold.py; a measurement that failed is kept
as one without times, so that it is not tried at every start. On a CPU, and for one rank, nothing is measured or said.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from vllm.platforms import current_platform

from shared.engine.vllm_setup import installed_vllm
from shared.engine.weave_kept import driver_version, key_of, read_kept, write_kept
from shared.engine.worker_config import WorkerSettings, has_slots, works_in_pages
from shared.kernels.allreduce_rmsnorm.driver import source_digest
from shared.kv.model_files import read_config
from shared.weave.role_choice import Choice, choose, in_words
from shared.weave.threshold import Measured, Timing, pack_measured, unpack_measured
from shared.weave.tiles import DEFAULT_TILE

logger = logging.getLogger(__name__)

# Of both engines together. Each is ready in about 60 s (an H200, 16 layers, compiled: twice what is started here), and
# then measures for 20 s and two rounds; a start, which is awaited 300 s, has to hold them and the engine itself.
PROBES_LIMIT_S = 200.0
SHAPE_FIELDS = (
    "architectures", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "torch_dtype", "dtype", "quantization_config", "vocab_size",
)  # fmt: skip
PROBE = 3  # another measurement of the same: what was kept of an earlier one is not read
SUMS_ENVIRONMENT = (
    "NCCL_",
    "NVSHMEM_",
    "TORCH_SYMM_MEM_",
    "VLLM_ALLREDUCE_",
    "VLLM_FLASHINFER_",
    "VLLM_USE_NCCL_",
)
_TILES = [(DEFAULT_TILE.tokens, DEFAULT_TILE.columns)] * 4


def auto_choice(settings: WorkerSettings, arguments: Mapping[str, Any], reason: str) -> Choice | None:
    """None: vLLM's own way. One line of the log where there is more than one rank on GPUs.

    Args: arguments: what the engine is started with, else; reason: why it cannot be hosted, as far as that is known.
    Cost: at the first start of a model's shape on such GPUs a minute or two, afterwards a read of a small file.
    """
    if not current_platform.is_cuda() or settings.tensor_parallel_size == 1:
        return None
    if reason := reason or _why_not(settings, arguments):
        logger.info("worker.weave = auto: vLLM's own all-reduce and norm are used: %s", reason)
        return None
    path = _path(settings)
    found = _read(path)
    if found is None:
        found = Measured(timings=_measure(settings), tiles=_TILES)
        write_kept(path, pack_measured(path.stem.removeprefix("weave-auto-"), found))
    choice = choose(found.timings, settings.role or "colocated")
    said = (
        in_words(choice)
        if found.timings
        else f"vLLM's own way: nothing was measured; remove {path} to try again"
    )
    logger.info("worker.weave = auto: %s; %s", said, found.timings)
    return choice


def _why_not(settings: WorkerSettings, arguments: Mapping[str, Any]) -> str:
    if not settings.state_dir:
        return "there is no worker.state_dir to keep in what is measured"
    if has_slots(settings) or settings.transfer_mode == "by-layer" or "attention_backend" in arguments:
        return "each layer counts once a step"
    ranks = range(settings.tensor_parallel_size)
    if not current_platform.is_fully_connected(
        [current_platform.device_id_to_physical_device_id(i) for i in ranks]
    ):
        return "the GPUs do not reach each other's memory over NVLink"
    if settings.calibrate == "off" and not _path(settings).is_file():
        return "nothing is measured with worker.calibrate = off"
    return ""


def _path(settings: WorkerSettings) -> Path:
    """Where the times are kept."""
    return Path(settings.state_dir, f"weave-auto-{_key(settings)}.json")


def _key(settings: WorkerSettings) -> str:
    """Of what the times belong to; the role is asked of them anew."""
    config = read_config(settings.model_dir)
    return key_of(
        {name: config.get(name) for name in SHAPE_FIELDS}, settings.dtype, settings.tensor_parallel_size,
        settings.weave_sms, settings.max_num_batched_tokens, settings.max_num_seqs, settings.enforce_eager,
        settings.graph_tokens, settings.block_tokens, works_in_pages(settings), PROBE, _vllms_own_sums(),
        current_platform.get_device_name(), installed_vllm(), metadata.version("torch"), driver_version(),
        source_digest(),
    )  # fmt: skip


def _vllms_own_sums() -> tuple[object, ...]:
    """What decides by which kernels stock vLLM adds up, beside GPUs and versions."""
    environ = os.environ  # noqa: TID251  NCCL's, torch's and vLLM's settings, not ours
    asked = sorted((name, value) for name, value in environ.items() if name.startswith(SUMS_ENVIRONMENT))
    return find_spec("flashinfer") is not None, asked


def _measure(settings: WorkerSettings) -> list[Timing]:
    """[] where an engine fails, said in the log."""
    times: dict[str, dict[int, dict[str, float]]] = {}
    began_s = time.monotonic()
    for kind in ("stock", "weave"):
        with tempfile.TemporaryDirectory(prefix="quire-weave-") as folder:
            out, log = Path(folder, "out.json"), Path(folder, "log")
            why = _run(settings, kind, out, log, PROBES_LIMIT_S - (time.monotonic() - began_s))
            if why or not out.is_file():
                lines = log.read_text(errors="replace").splitlines()
                wrong = [line for line in lines if "Error" in line] or lines or [""]
                logger.warning(
                    "worker.weave = auto: %s engine to measure %s: %s", kind, why or "failed", wrong[-1]
                )
                return []
            logger.info(
                "worker.weave = auto: %s engine measured after %.0f s", kind, time.monotonic() - began_s
            )
            times[kind] = msgspec.json.decode(out.read_bytes(), type=dict[int, dict[str, float]])
    return [
        Timing(
            num_tokens=count, off_us=stock["stock"], fuse_us=times["weave"][count]["fuse"],
            full_us=times["weave"][count].get("full", 0.0),
        )
        for count, stock in sorted(times["stock"].items())
        if count in times["weave"] and stock["stock"] > 0.0 and times["weave"][count]["fuse"] > 0.0
    ]  # fmt: skip


def _run(settings: WorkerSettings, kind: str, out: Path, log: Path, limit_s: float) -> str:
    """Why it came to no end. Nothing of it is left: a worker that is stopped or killed meanwhile takes it along."""
    given = out.with_name("settings.json")
    bare = msgspec.structs.replace(settings, weave="off", coordinator_key="", redis_url="")
    given.write_bytes(msgspec.json.encode(bare))
    words = [sys.executable, "-m", "shared.engine.weave_probe", kind, str(given), str(out), str(os.getpid())]
    with log.open("wb") as file:
        # a group of its own within the worker's session, which the supervisor's guard ends
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, process_group=0)
        try:
            status = process.wait(limit_s)
            return f"ended with status {status}" if status else ""
        except subprocess.TimeoutExpired:
            return f"took more than {limit_s:.0f} s"
        finally:
            _end_group(process)


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(20)


def _read(path: Path) -> Measured | None:
    data = read_kept(path)
    return None if data is None else unpack_measured(data, path.stem.removeprefix("weave-auto-"))
