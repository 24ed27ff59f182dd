"""What a worker is connected to: mempool, coordinator, prompt tree. Each may be missing or come later."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shared.engine.interface import CacheEvent
from shared.engine.worker_config import WorkerSettings
from shared.engine.worker_loads import LoadReports
from shared.engine.worker_membership import MembershipKeeper
from shared.engine.worker_shell import WorkerShell
from shared.ids import Epoch, InstanceId
from shared.mempool.client import MempoolClient
from shared.prompttree.publisher import PromptTreePublisher
from shared.wire.membership import Register
from shared.wire.reports import Role


def host_id() -> str:
    """Equal for processes that can share memory: the kernel's boot id."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class TreeOfInstance:
    """The engine's cache events as this instance's entries in the prompt tree.

    Events before the first epoch are kept by the publisher and published under it.
    """

    def __init__(self, settings: WorkerSettings, role: Role, on_stale: Callable[[], None]) -> None:
        self._publisher = PromptTreePublisher(
            settings.redis_url,
            owner=settings.instance,
            epoch=Epoch(0),
            row=role,
            on_stale=on_stale,
        )

    def publish(self, event: CacheEvent) -> None:
        """Only notes; never waits."""
        match event.kind:
            case "stored":
                self._publisher.stored(event.hashes)
            case "removed":
                self._publisher.removed(event.hashes)
            case "cleared":
                self._publisher.cleared()

    def set_epoch(self, epoch: Epoch) -> None:
        """Publish under this epoch from now on."""
        self._publisher.renew(epoch)
        self._publisher.open()

    @property
    def in_sync(self) -> bool:
        """Redis has been told everything."""
        return self._publisher.in_sync

    async def close(self) -> None:
        """Withdraw the entries."""
        await self._publisher.close()


@dataclass(slots=True)
class Wires:
    """Made before the shell, attached to it, closed after it."""

    settings: WorkerSettings
    pages: MempoolClient | None = None
    loads: LoadReports | None = None

    def attach(self, shell: WorkerShell) -> None:
        """Give the shell its membership and its publisher."""

        def register(endpoint: str) -> Register:
            return Register(
                instance=InstanceId(self.settings.instance),
                role=shell.role,
                endpoint=endpoint,
                host=host_id(),
                description=shell.engine.description,
                pid=os.getpid(),
            )

        shell.membership = MembershipKeeper(
            self.settings, register=register, load=shell.load, on_epoch=shell.set_epoch
        )
        if self.settings.redis_url:
            shell.publisher = TreeOfInstance(self.settings, shell.role, shell.membership.register_again)
        if self.pages is not None and shell.engine.uses_pool:
            self.loads = LoadReports(
                self.pages, shell.engine.description.model,
                load=shell.load, num_arrived=lambda: shell.front.num_accepted, epoch=lambda: shell.epoch,
            )  # fmt: skip
            self.loads.open()

    async def close(self) -> None:
        """After the shell's end."""
        if self.loads is not None:
            await self.loads.close()
        if self.pages is not None:
            await self.pages.close()


def connect(settings: WorkerSettings) -> Wires:
    """Begin to connect to the pool that the settings name. On the running loop; does not wait."""
    wires = Wires(settings)
    if settings.mempool_socket:
        wires.pages = MempoolClient(settings.mempool_socket, InstanceId(settings.instance))
        wires.pages.start()
    return wires
