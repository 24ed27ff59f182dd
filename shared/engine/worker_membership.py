"""A worker's membership at the coordinator: the shared client, with what /ready says about it.

Somebody who knows a larger epoch of this instance (the scheduler, the prompt tree) makes it register again.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from shared.background_task import begin_task
from shared.engine.interface import EngineLoad
from shared.engine.worker_config import WorkerSettings
from shared.ids import Epoch
from shared.observe.log import get_logger
from shared.transport.membership_client import MembershipClient
from shared.wire.membership import Heartbeat, Register

AGAIN_PAUSE_MS = 500  # two processes that claim one id must not register in a tight race
MAX_PAUSE_MS = 30_000  # each time in a row twice the time before: a larger epoch does not help everywhere
CALM_MS = 10_000  # without being asked, after a pause: the next time is the first again

_log = get_logger("worker.membership")


class MembershipKeeper:
    """start() once, leave() last. on_epoch runs on the loop for every epoch that is granted."""

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        register: Callable[[str], Register],
        load: Callable[[], EngineLoad],
        on_epoch: Callable[[Epoch], None],
    ) -> None:
        self.problem = "not asked yet"
        self._settings = settings
        self._register = register
        self._load = load
        self._on_epoch = on_epoch
        self._endpoint = ""
        self._client: MembershipClient | None = None
        self._again: asyncio.Task[None] | None = None
        self._pause_ms = AGAIN_PAUSE_MS  # before the next time
        self._calm_at_s = 0.0

    @property
    def registered(self) -> bool:
        """The coordinator has given this process an epoch; it may be out of reach now."""
        return self._client is not None and self._client.epoch is not None

    def start(self, endpoint: str) -> None:
        """Begin to register this instance at `endpoint`. Does not wait."""
        self._endpoint = endpoint
        self._open()

    def register_again(self) -> None:
        """Ask for a larger epoch. Asking while it is being asked changes nothing."""
        if self._again is None and self._client is not None:
            pause_ms = self._next_pause_ms(asyncio.get_running_loop().time())
            self._again = begin_task(self._replace(self._client, pause_ms), "register-again")

    def _next_pause_ms(self, now_s: float) -> int:
        pause_ms = self._pause_ms if now_s < self._calm_at_s else AGAIN_PAUSE_MS
        self._pause_ms = min(MAX_PAUSE_MS, 2 * pause_ms)
        self._calm_at_s = now_s + (pause_ms + CALM_MS) / 1000
        return pause_ms

    async def leave(self) -> None:
        """Orderly end. An absent coordinator notices by itself."""
        if self._again is not None:
            self._again.cancel()
            await asyncio.wait([self._again])
        if self._client is not None:
            await self._client.close()

    def _open(self) -> None:
        self._client = MembershipClient(
            self._settings.coordinator_url,
            self._register(self._endpoint),
            key=self._settings.coordinator_key,
            heartbeat=self._heartbeat,
            on_epoch=self._on_epoch,
            on_event=self._on_event,
        )
        self._client.open()

    async def _replace(self, old: MembershipClient, pause_ms: int) -> None:
        """It beats for most of a long pause: by a member that lives the scheduler sees who is the right one."""
        _log.warning("registering_again", epoch=old.epoch, pause_ms=pause_ms)
        await asyncio.sleep((pause_ms - AGAIN_PAUSE_MS) / 1000)
        await old.pause()  # not closed: leave() may come meanwhile
        await asyncio.sleep(AGAIN_PAUSE_MS / 1000)
        await old.close(leave=False)
        self._open()
        self._again = None

    def _heartbeat(self, epoch: Epoch) -> Heartbeat:
        load = self._load()
        return Heartbeat(
            epoch=epoch,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            kv_used_share=load.kv_used_share,
        )

    def _on_event(self, event: str, ids: dict[str, Any]) -> None:
        if event == "registered":  # the shell logs it
            return
        self.problem = str(ids.get("error") or "")
        (_log.warning if self.problem else _log.info)(event, **ids)
