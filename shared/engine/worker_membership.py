"""Membership at the coordinator: register until it answers, then heartbeats; register again when told.

REGISTERING -(201, epoch)-> MEMBER -(404, 409 or register_again)-> REGISTERING
MEMBER -(no answer)-> MEMBER: the epoch stays, requests go on, the next heartbeat tries again
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import httpx
import msgspec

from shared.engine.interface import EngineLoad
from shared.engine.worker_config import WorkerSettings
from shared.errors import PeerError, PeerProtocolError, StaleEpoch
from shared.ids import Epoch
from shared.observe.log import get_logger
from shared.wire.membership import Heartbeat, HeartbeatReply, Register, Registered

CALL_TIMEOUT_S = 2.0
RETRY_MIN_MS, RETRY_MAX_MS = 100, 2_000
AGAIN_PAUSE_MS = 500  # between two registrations that a refusal asked for: two owners of an id must not race

_log = get_logger("worker.membership")
T = TypeVar("T", Registered, HeartbeatReply)


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
        self.registered = False
        self.problem = "not asked yet"
        self._instance = settings.instance
        self._url = settings.coordinator_url.rstrip("/") + "/v1/instances"
        self._headers = {"content-type": "application/json"}
        if settings.coordinator_key:
            self._headers["authorization"] = f"Bearer {settings.coordinator_key}"
        self._register = register
        self._load = load
        self._on_epoch = on_epoch
        self._epoch = Epoch(0)
        self._client: httpx.AsyncClient | None = None
        self._task: asyncio.Task[None] | None = None
        self._again = asyncio.Event()

    def start(self, endpoint: str) -> None:
        """Begin to register this instance at `endpoint`. Does not wait."""
        self._client = httpx.AsyncClient(timeout=CALL_TIMEOUT_S, headers=self._headers, trust_env=False)
        self._task = asyncio.get_running_loop().create_task(self._keep(endpoint), name="membership")

    def register_again(self) -> None:
        """Somebody knows a larger epoch of this instance: ask for one larger still."""
        self._again.set()

    async def leave(self) -> None:
        """Orderly end. An absent coordinator notices by itself."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        if self._client is None:
            return
        if self._epoch:
            try:
                await self._client.delete(f"{self._url}/{self._instance}", params={"epoch": self._epoch})
            except httpx.HTTPError as error:
                _log.info("deregister_failed", error=repr(error))
        await self._client.aclose()
        self._client = None

    async def _keep(self, endpoint: str) -> None:
        while True:
            interval_ms = await self._join(endpoint)
            await self._stay(interval_ms)
            self.registered = False
            await asyncio.sleep(AGAIN_PAUSE_MS / 1000)

    async def _join(self, endpoint: str) -> int:
        """Register, trying again with growing pauses; the heartbeat interval."""
        retry_ms = RETRY_MIN_MS
        while True:
            try:
                granted = await self._call("", self._register(endpoint), Registered)
            except PeerError as error:
                self._trouble(error.message)
                await asyncio.sleep(retry_ms / 1000)
                retry_ms = min(RETRY_MAX_MS, 2 * retry_ms)
                continue
            self._again.clear()
            self._epoch = granted.epoch
            self.registered, self.problem = True, ""
            self._on_epoch(granted.epoch)
            return max(10, granted.heartbeat_interval_ms)

    async def _stay(self, interval_ms: int) -> None:
        """Heartbeats until this epoch is no longer the coordinator's."""
        while True:
            try:
                async with asyncio.timeout(interval_ms / 1000):
                    await self._again.wait()
                _log.warning("registering_again", reason="the scheduler knows a larger epoch")
                return
            except TimeoutError:
                load = self._load()
            beat = Heartbeat(
                epoch=self._epoch,
                num_running=load.num_running,
                num_waiting=load.num_waiting,
                kv_used_share=load.kv_used_share,
            )
            try:
                await self._call(f"/{self._instance}/heartbeat", beat, HeartbeatReply)
                self.problem = ""
            except StaleEpoch as error:
                _log.warning("registering_again", reason=error.message)
                return
            except PeerError as error:
                self._trouble(error.message)

    def _trouble(self, text: str) -> None:
        if text != self.problem:  # once per kind of trouble, not per attempt
            _log.warning("coordinator_trouble", error=text)
        self.problem = text

    async def _call(self, path: str, body: Register | Heartbeat, kind: type[T]) -> T:
        """Raises: StaleEpoch when the coordinator does not know this epoch; PeerError for the rest."""
        assert self._client is not None
        try:
            answer = await self._client.post(self._url + path, content=msgspec.json.encode(body))
        except httpx.HTTPError as error:
            raise PeerError(f"no answer from {self._url}: {type(error).__name__}") from None
        if answer.status_code in (404, 409) and path:
            raise StaleEpoch(f"the coordinator answered {answer.status_code}: {answer.text[:200]}")
        if answer.status_code not in (200, 201):
            raise PeerError(f"the coordinator answered {answer.status_code}: {answer.text[:200]}")
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except msgspec.MsgspecError as error:
            raise PeerProtocolError(f"the coordinator's answer is no {kind.__name__}: {error}") from None
