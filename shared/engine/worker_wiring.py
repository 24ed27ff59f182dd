"""What a worker is connected to: the mempool, the coordinator, the prompt tree. Each may be missing or come later."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from shared.engine.interface import Engine
from shared.engine.worker_config import WorkerSettings
from shared.engine.worker_shell import WorkerShell
from shared.ids import InstanceId
from shared.mempool.client import MempoolClient


@dataclass(slots=True)
class Wires:
    """Made before the shell, attached to it, closed after it."""

    settings: WorkerSettings
    engine: Engine
    pages: MempoolClient | None = None
    closers: list[Callable[[], Coroutine[Any, Any, None]]] = field(default_factory=list)

    def attach(self, shell: WorkerShell) -> None:
        """Give the shell its membership and its publisher."""

    async def close(self) -> None:
        """After the shell's end."""
        for closer in self.closers:
            await closer()


def connect(settings: WorkerSettings, engine: Engine) -> Wires:
    """Begin to connect to everything that the settings name. On the running loop; does not wait."""
    wires = Wires(settings, engine)
    if settings.mempool_socket:
        wires.pages = MempoolClient(settings.mempool_socket, InstanceId(settings.instance))
        wires.pages.start()
        wires.closers.append(wires.pages.close)
    return wires
