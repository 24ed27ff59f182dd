"""`python -m services.scheduler --listen tcp://127.0.0.1:8101`: settings, clock, sockets, core -> run."""

import asyncio
import secrets
import signal
import sys
from typing import Any

import msgspec
import uvloop

from services.scheduler import config
from services.scheduler.config import SchedulerSettings
from services.scheduler.shell import Scheduler
from shared.errors import SettingsError
from shared.observe import log, trace
from shared.observe.admin import AdminServer
from shared.transport.clock import MonotonicClock
from shared.transport.heap import settle_heap

EXIT_SETTINGS = 2
EXIT_BUG = 70


async def run(settings: SchedulerSettings) -> int:
    """Serve until SIGTERM or SIGINT; the exit status."""
    logger = log.get_logger("scheduler")
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def end(status: int) -> None:
        if not ended.done():
            ended.set_result(status)

    def on_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        logger.error("loop_error", message=context["message"], exc_info=context.get("exception"))
        if "handle" in context:  # a handler raised: our bug, and its state may be half changed
            end(EXIT_BUG)

    loop.set_exception_handler(on_loop_error)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, 0)
    scheduler = Scheduler(settings, MonotonicClock(), boot=f"{settings.instance}-{secrets.token_hex(6)}")
    admin = AdminServer(settings.admin_listen, ready=scheduler.readiness, status=scheduler.status)
    try:
        await scheduler.start()
        await admin.start()
        settle_heap()
        listen, report_listen = scheduler.addresses
        logger.info("listening", place=listen, report=report_listen, admin=admin.address)
        logger.info("settings", **{**msgspec.to_builtins(settings), "coordinator_key": "***"})
        return await ended
    finally:
        await admin.stop()
        await scheduler.stop()


def main() -> int:
    """Exit status 0 after a signal, 2 on wrong settings, 70 on a bug of ours."""
    if not __debug__:
        print("quire does not run with -O: it relies on its assertions", file=sys.stderr)  # noqa: T201
        return EXIT_SETTINGS
    try:
        settings = config.load(sys.argv[1:])
        log.setup("scheduler", settings.instance, settings.log_level)
        trace.setup(
            "scheduler",
            settings.instance,
            endpoint=settings.trace_endpoint,
            directory=settings.trace_dir,
            sample_ratio=settings.trace_sample_ratio,
        )
        status = uvloop.run(run(settings))
    except SettingsError as error:
        print(f"scheduler: {error.message}", file=sys.stderr)  # noqa: T201
        return EXIT_SETTINGS
    trace.shutdown()
    return status


if __name__ == "__main__":
    sys.exit(main())
