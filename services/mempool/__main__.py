"""`python -m services.mempool --socket .quire/run/mempool.sock`: settings, clock, socket, core -> run."""

import sys
import time

import msgspec

from services.mempool import config
from services.mempool.collector import PoolCollector
from services.mempool.config import MempoolSettings
from services.mempool.shell import MempoolShell
from shared.ids import Epoch
from shared.observe import log, service
from shared.observe.admin import AdminServer
from shared.transport.clock import MonotonicClock


async def run(settings: MempoolSettings) -> int:
    """Serve until SIGTERM or SIGINT; the exit status."""
    ended = service.end_on_signal()
    shell = MempoolShell(
        config.socket_path(settings),
        config.limits(settings),
        Epoch(time.time_ns() // 1_000),
        MonotonicClock(),
        frozenset(settings.allowed_uids) or None,
    )
    service.end_on_bug("mempool", ended, shell.status)
    PoolCollector(shell)
    admin = AdminServer(settings.admin_listen, ready=lambda: (True, {}), status=shell.status)
    await shell.start()
    try:
        await admin.start()
        log.get_logger("mempool").info("settings", admin=admin.address, **msgspec.to_builtins(settings))
        return await ended
    finally:
        await admin.stop()
        shell.close()


if __name__ == "__main__":
    sys.exit(service.main("mempool", config.load, run))
