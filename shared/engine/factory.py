"""The engine that the settings name. Only this module knows that there is more than one."""

from pathlib import Path

from shared.engine.interface import Engine
from shared.engine.worker_config import WorkerSettings


def choose_device(settings: WorkerSettings, vllm_distribution: str) -> str:
    """ "cpu" or "cuda": the setting, else what the installed vLLM and this machine can do."""
    if settings.device != "auto":
        return settings.device
    return "cuda" if vllm_distribution == "vllm" and Path("/dev/nvidiactl").exists() else "cpu"


def make_engine(settings: WorkerSettings) -> Engine:
    """Construct, not start. Call it before there is an event loop: the vLLM engine forks its core here.

    Raises: SettingsError when the engine cannot be hosted with these settings.
    """
    if settings.engine == "mock":
        from shared.testing.mock_engine import MockEngine

        return MockEngine(settings)
    from shared.engine.crashes import die_when_crashed
    from shared.engine.vllm_setup import check_platform, check_version, engine_environment, quick_imports

    device = choose_device(settings, check_version())
    engine_environment(settings, device)
    with quick_imports():
        check_platform(device)
        from shared.engine.vllm_engine import VllmEngine
    die_when_crashed()  # its core and ranks: rank_processes.py

    return VllmEngine(settings)
