"""`python -m services.mempool --socket .quire/run/mempool.sock`: settings, clock, socket, core -> run."""

import sys
import time
from typing import TYPE_CHECKING, Any

from services.mempool import config
from services.mempool.collector import PoolCollector
from services.mempool.config import MempoolSettings
from services.mempool.kept import Kept
from services.mempool.lending_keys import lending_rules, read_profiles
from services.mempool.shell import MempoolShell
from services.mempool.tree import TreePublishers
from shared.ids import Epoch, InstanceId
from shared.observe import log, service
from shared.observe.admin import AdminServer
from shared.transport.clock import MonotonicClock
from shared.transport.heap import settle_heap
from shared.transport.unix_socket import take_all_descriptors

if TYPE_CHECKING:
    from services.mempool.desk_loop import DeskLoop
    from services.mempool.market import Market


async def open_peers(shell: MempoolShell, settings: MempoolSettings) -> None:
    """Links to mempools of other hosts. Raises: SettingsError."""
    from services.mempool.peer_setup import pins_memory, prepare_ucx

    prepare_ucx(settings)
    await shell.open_peers(
        settings.peer_listen, settings.instance,
        max_peers=settings.max_peers, pins_memory=pins_memory(settings), silent_ms=settings.peer_silent_ms,
    )  # fmt: skip
    own = shell.pool.peer_address
    shell.pool.api.peers.addresses = tuple(each for each in settings.api_peers if each != own)
    shell.perform(shell.pool.tick(shell.clock.now_ms()))


def open_market(shell: MempoolShell, settings: MempoolSettings) -> "Market | None":
    """Reports to the coordinator of what is lent; None where none is named."""
    if not settings.coordinator_url:
        return None
    from services.mempool.market import Market  # brings an HTTP client

    url, key = settings.coordinator_url, settings.coordinator_key
    market = Market(url, key, settings.market_name or settings.instance, settings.socket, shell)
    market.open()
    return market


def open_desk(shell: MempoolShell, settings: MempoolSettings) -> "DeskLoop | None":
    """Lending by itself, before anybody attaches; None where it is off. Raises: SettingsError about a profile."""
    if not settings.coordinator_url or settings.lending == "off":
        return None
    from services.mempool.desk_loop import DeskLoop  # brings an HTTP client
    from services.mempool.lending_metrics import LendingCollector

    name, interval_ms = InstanceId(settings.market_name or settings.instance), settings.lending_interval_ms
    desk = shell.pool.open_desk(lending_rules(settings), read_profiles(settings), name, interval_ms)
    LendingCollector(shell.pool, desk)
    return DeskLoop(settings.coordinator_url, settings.coordinator_key, shell, desk, interval_ms)


async def run(settings: MempoolSettings) -> int:
    """Serve until SIGTERM or SIGINT; the exit status."""
    ended = service.end_on_signal()
    take_all_descriptors()  # one a slab, while adopting
    kept = Kept(settings.keeper_socket, Epoch(time.time_ns() // 1_000))
    found = kept.take_over()
    shell = MempoolShell(
        config.socket_path(settings),
        config.limits(settings),
        found.boot_generation,
        MonotonicClock(),
        frozenset(settings.allowed_uids) or None,
        kept,
        copying=config.copy_options(settings),
        api_path=config.api_path(settings),
        checksum_rate=settings.checksum_rate,
    )
    service.end_on_bug("mempool", ended, shell.status)
    PoolCollector(shell)
    desk = open_desk(shell, settings)

    def status() -> dict[str, Any]:
        return shell.status() | ({"lending": desk.status()} if desk is not None else {})

    admin = AdminServer(settings.admin_listen, ready=lambda: (True, {}), status=status)
    shell.adopt(found)
    kept.watch()
    if settings.peer_listen:
        await open_peers(shell, settings)
    await shell.start()
    tree = TreePublishers(settings.redis_url, settings.instance, settings.peer_listen, shell.pool)
    tree.open()
    market = open_market(shell, settings)
    if desk is not None:
        desk.open()
    try:
        await admin.start()
        settle_heap()
        log.get_logger("mempool").info("settings", admin=admin.address, **service.shown(settings))
        return await ended
    finally:
        await admin.stop()
        await tree.close()
        if desk is not None:
            await desk.close()
        if market is not None:
            await market.close()
        shell.close()


if __name__ == "__main__":
    sys.exit(service.main("mempool", config.load, run))
