"""`python -m services.scheduler --listen tcp://127.0.0.1:8101`: settings, clock, sockets, core -> run."""

import secrets
import sys

from services.scheduler import config
from services.scheduler.config import SchedulerSettings
from services.scheduler.shell import Scheduler
from shared.observe import log, service
from shared.observe.admin import AdminServer
from shared.transport.clock import MonotonicClock
from shared.transport.heap import settle_heap


async def run(settings: SchedulerSettings) -> int:
    """Serve until SIGTERM or SIGINT; the exit status."""
    logger = log.get_logger("scheduler")
    ended = service.end_on_signal()
    service.end_on_bug("scheduler", ended)
    scheduler = Scheduler(settings, MonotonicClock(), boot=f"{settings.instance}-{secrets.token_hex(6)}")
    admin = AdminServer(settings.admin_listen, ready=scheduler.readiness, status=scheduler.status)
    try:
        await scheduler.start()
        await admin.start()
        settle_heap()
        listen, report_listen = scheduler.addresses
        logger.info("listening", place=listen, report=report_listen, admin=admin.address)
        logger.info("settings", **service.shown(settings))
        return await ended
    finally:
        await admin.stop()
        await scheduler.stop()


if __name__ == "__main__":
    sys.exit(service.main("scheduler", config.load, run))
