"""`python -m services.mempool --socket .quire/run/mempool.sock`: settings, clock, socket, core -> run."""

import asyncio
import signal
import sys
import time
from typing import Any

import msgspec
import uvloop

from services.mempool import config
from services.mempool.collector import PoolCollector
from services.mempool.config import MempoolSettings
from services.mempool.shell import MempoolShell
from shared.errors import SettingsError
from shared.ids import Epoch
from shared.observe import log, trace
from shared.observe.admin import AdminServer
from shared.transport.clock import MonotonicClock

EXIT_SETTINGS = 2
EXIT_BUG = 70


async def run(settings: MempoolSettings) -> int:
    """Serve until SIGTERM or SIGINT; the exit status."""
    logger = log.get_logger("mempool")
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def end(status: int) -> None:
        if not ended.done():
            ended.set_result(status)

    shell = MempoolShell(
        config.socket_path(settings),
        config.limits(settings),
        Epoch(time.time_ns() // 1_000),
        MonotonicClock(),
        frozenset(settings.allowed_uids) or None,
    )

    def on_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        logger.error("loop_error", message=context["message"], exc_info=context.get("exception"))
        if "handle" in context:  # one of the shell's callbacks: nobody goes on from there
            logger.error("invariant_broken", **shell.status())
            end(EXIT_BUG)

    loop.set_exception_handler(on_loop_error)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, 0)
    PoolCollector(shell)
    admin = AdminServer(settings.admin_listen, ready=lambda: (True, {}), status=shell.status)
    await shell.start()
    try:
        await admin.start()
        logger.info("settings", admin=admin.address, **msgspec.to_builtins(settings))
        return await ended
    finally:
        await admin.stop()
        shell.close()


def main() -> int:
    """Exit status 0 after a signal, 2 on wrong settings, 70 on a bug of ours."""
    if not __debug__:
        print("quire does not run with -O: it relies on its assertions", file=sys.stderr)  # noqa: T201
        return EXIT_SETTINGS
    try:
        settings = config.load(sys.argv[1:])
        log.setup("mempool", settings.instance, settings.log_level)
        trace.setup(
            "mempool",
            settings.instance,
            endpoint=settings.trace_endpoint,
            directory=settings.trace_dir,
            sample_ratio=settings.trace_sample_ratio,
        )
        status = uvloop.run(run(settings))
    except SettingsError as error:
        print(f"mempool: {error.message}", file=sys.stderr)  # noqa: T201
        return EXIT_SETTINGS
    trace.shutdown()
    return status


if __name__ == "__main__":
    sys.exit(main())
