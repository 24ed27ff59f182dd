"""A worker's process: settings -> engine, clients, shell -> run. Both worker services end up here."""

import os
import sys
from typing import NoReturn

import uvloop

from shared.engine.factory import make_engine
from shared.engine.interface import Engine
from shared.engine.worker_config import WorkerSettings, ahead_prevented_by
from shared.engine.worker_shell import WorkerShell
from shared.engine.worker_wiring import connect
from shared.errors import SettingsError
from shared.frame_room import with_frame_room
from shared.kv.model_files import vocab_size
from shared.observe import log, trace
from shared.observe.log import get_logger
from shared.observe.service import shown

EXIT_SETTINGS = 2


async def _serve(settings: WorkerSettings, engine: Engine) -> int:
    wires = connect(settings)
    try:
        shell = WorkerShell(settings, engine, wires.pages, vocab_size(settings.model_dir))
        wires.attach(shell)
        return await shell.run()
    except SettingsError:
        await engine.close()  # a shell that could not begin, as where an address is taken, has not
        raise
    finally:
        await wires.close()


def run(service: str, settings: WorkerSettings) -> int:
    """Exit code: 0 drained, 1 the engine died, 2 wrong settings, 70 our bug."""
    if sys.stdout is sys.__stdout__:  # else it is somebody's: the zygote's, or a test's
        log.bear_full_disk()
    return with_frame_room(
        _run, service, settings
    )  # the engine core, forked in here, launches its layers in it


def _run(service: str, settings: WorkerSettings) -> int:
    log.setup(service, settings.instance, settings.log_level)
    logger = get_logger("worker")
    if not __debug__:
        logger.error(
            "settings_invalid", error="python -O drops the assertions that guard invariants; leave it out"
        )
        return EXIT_SETTINGS
    logger.info("settings", **_shown(settings))
    if prevented_by := ahead_prevented_by(settings):
        logger.warning(
            "handoff_ahead_off",
            because=f"worker.{prevented_by}",
            value=getattr(settings, prevented_by),
            effect="blocks of a long prompt leave for decode when all of it is computed",
        )
    try:
        engine = make_engine(settings)  # before the loop and before any thread: it forks
        trace.setup(
            service,
            settings.instance,
            endpoint=settings.trace_endpoint,
            directory=settings.trace_dir,
            sample_ratio=settings.trace_sample_ratio,
            with_libraries=settings.engine == "vllm",
        )
        return uvloop.run(_serve(settings, engine))
    except SettingsError as error:
        logger.error("settings_invalid", error=error.message)
        return EXIT_SETTINGS
    finally:
        trace.shutdown()


def leave(code: int) -> NoReturn:
    """End the process at once. Tearing an interpreter with torch down takes 10 s, and nothing is owed by then."""
    log.flush_streams()
    os._exit(code)


def _shown(settings: WorkerSettings) -> dict[str, object]:
    """Effective settings without what is for the mock alone."""
    hidden = ("instance",) if settings.engine == "mock" else ("instance", "mock_")
    return {name: value for name, value in shown(settings).items() if not name.startswith(hidden)}
