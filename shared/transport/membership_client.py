"""The coordinator's REST API from the other side: MembershipClient for members, MembershipPoller for readers.

Both run in the background of their process's loop. A coordinator that is slow, wrong or gone is reported to
on_event and tried again; a member keeps its epoch meanwhile, a reader its last list.
"""

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from shared.background_task import begin_task
from shared.errors import PeerError
from shared.ids import Epoch
from shared.transport.coordinator_api import CoordinatorApi, MustRegister
from shared.wire.membership import Heartbeat, HeartbeatReply, InstanceList, Register, Registered

RETRY_MIN_S = 0.1
RETRY_MAX_S = 2.0
SAID_AGAIN_S = 30.0  # why it cannot register: who looks at a log looks at its end
MIN_INTERVAL_S = 0.02  # whatever the coordinator says

Event = Callable[[str, dict[str, Any]], None]


class Background:
    """A task that runs until close()."""

    def __init__(self, on_event: Event | None) -> None:
        self.reachable = False
        self._on_event = on_event
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Start in the background of the running loop. Never waits. What a callback raises is told to the loop."""
        if self._task is None:
            self._task = begin_task(self._run(), type(self).__name__)

    async def _stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        raise AssertionError("each kind has its own")

    def _say(self, event: str, **ids: Any) -> None:
        if self._on_event is not None:
            self._on_event(event, ids)

    def _set_reachable(self, reachable: bool, error: str = "") -> None:
        if reachable != self.reachable:
            self.reachable = reachable
            self._say("coordinator_reached" if reachable else "coordinator_lost", error=error)


class MembershipClient(Background):
    """Keeps one instance a member: registers, beats, registers again when the coordinator forgot it.

    Args:
        heartbeat: makes the next Heartbeat; called on the loop, must not wait.
        on_epoch: runs with every newly granted epoch, the first included, before it is used in a heartbeat.
        on_event: event name and ids, for the caller's log.
    """

    def __init__(
        self,
        coordinator_url: str,
        register: Register,
        *,
        key: str = "",
        heartbeat: Callable[[Epoch], Heartbeat],
        on_epoch: Callable[[Epoch], None],
        on_event: Event | None = None,
    ) -> None:
        super().__init__(on_event)
        self.epoch: Epoch | None = None  # None until the first registration
        self._api = CoordinatorApi(coordinator_url, key)
        self._register = register
        self._heartbeat = heartbeat
        self._on_epoch = on_epoch
        self._closed = False
        self._path = f"/v1/instances/{quote(register.instance, safe='')}"

    async def close(self, *, leave: bool = True) -> None:
        """Stop; `leave` also tells the coordinator, waiting at most for one call's timeout. Harmless when closed."""
        await self._stop()
        if leave and self.epoch is not None and not self._closed:
            try:
                await self._api.send("DELETE", f"{self._path}?epoch={self.epoch}")
            except PeerError as error:
                self._say("leave_failed", error=error.message)  # the time to live ends the membership
        self._closed = True
        await self._api.close()

    async def pause(self) -> None:
        """No beat any more; close() still leaves."""
        await self._stop()

    async def _run(self) -> None:
        while True:
            registered = await self._registered()
            await self._beat_until_forgotten(registered)

    async def _registered(self) -> Registered:
        wait_s = RETRY_MIN_S
        loop = asyncio.get_running_loop()
        say_at_s = loop.time()
        while True:
            try:
                registered = await self._api.ask("POST", "/v1/instances", Registered, self._register)
            except PeerError as error:
                if loop.time() >= say_at_s:
                    say_at_s = loop.time() + SAID_AGAIN_S
                    self._say("register_failed", error=error.message)
                self._set_reachable(False, error.message)
                await asyncio.sleep(wait_s)
                wait_s = min(RETRY_MAX_S, 2 * wait_s)
                continue
            self._set_reachable(True)
            self.epoch = registered.epoch
            self._say("registered", epoch=registered.epoch)
            self._on_epoch(registered.epoch)
            return registered

    async def _beat_until_forgotten(self, registered: Registered) -> None:
        interval_s = max(MIN_INTERVAL_S, registered.heartbeat_interval_ms / 1000)
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            try:
                beat = self._heartbeat(registered.epoch)
                await self._api.ask("POST", f"{self._path}/heartbeat", HeartbeatReply, beat)
                self._set_reachable(True)
            except MustRegister as error:
                self._say("membership_ended", error=error.message, epoch=registered.epoch)
                return
            except PeerError as error:
                self._set_reachable(False, error.message)
            next_s = max(next_s + interval_s, loop.time())
            await asyncio.sleep(next_s - loop.time())


class MembershipPoller(Background):
    """Asks for the list of members. on_list runs on the loop with every list that has a new version,
    with `every_answer` also with one that it has had: that nothing has changed is news, too."""

    def __init__(
        self,
        coordinator_url: str,
        *,
        key: str = "",
        interval_ms: int = 1_000,
        on_list: Callable[[InstanceList], None],
        on_event: Event | None = None,
        every_answer: bool = False,
    ) -> None:
        super().__init__(on_event)
        self._every_answer = every_answer
        self.last: InstanceList | None = None
        self.asked = asyncio.Event()  # set after the first answer, or its failure: at most a call's timeout
        self._api = CoordinatorApi(coordinator_url, key)
        self._interval_s = interval_ms / 1000
        self._on_list = on_list

    async def close(self) -> None:
        """Stop; the last list stays."""
        await self._stop()
        await self._api.close()

    async def _run(self) -> None:
        while True:
            try:
                found = await self._api.ask("GET", "/v1/instances", InstanceList)
            except PeerError as error:
                self._set_reachable(False, error.message)
            else:
                self._set_reachable(True)
                is_new = self._every_answer or self.last is None or found.version != self.last.version
                self.last = found
                if is_new:
                    self._on_list(found)
            finally:
                self.asked.set()
            await asyncio.sleep(self._interval_s)
