"""Who is in the cluster: asks the coordinator each second and keeps the last answer.

The gateway needs it for the model's description (fingerprint, block size, context length) and to connect to
workers before the first request names them. Losing the coordinator changes nothing for requests.
"""

import asyncio
from collections.abc import Callable

import httpx
import msgspec

from shared.kv.layout import EngineDescription
from shared.observe.log import get_logger
from shared.wire.membership import InstanceList, InstanceView

REQUEST_TIMEOUT_S = 2.0
_log = get_logger("gateway.membership")


class Membership:
    """Last known members. `on_change` runs on the loop after every new version."""

    def __init__(
        self,
        coordinator_url: str,
        *,
        key: str = "",
        model: str,
        interval_ms: int = 1_000,
        on_change: Callable[[list[InstanceView]], None] | None = None,
    ) -> None:
        self.instances: list[InstanceView] = []
        self.description: EngineDescription | None = None
        self.reachable = False
        self._url = coordinator_url.rstrip("/") + "/v1/instances"
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._model = model
        self._interval_s = interval_ms / 1000
        self._on_change = on_change
        self._decoder = msgspec.json.Decoder(InstanceList)
        self._client: httpx.AsyncClient | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Ask once, then in the background. An absent coordinator is no error."""
        self._client = httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, headers=self._headers, trust_env=False)
        await self.refresh()
        self._task = asyncio.create_task(self._poll(), name="membership")

    async def stop(self) -> None:
        """End the polling."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.refresh()

    async def refresh(self) -> None:
        """One request to the coordinator."""
        assert self._client is not None
        try:
            reply = await self._client.get(self._url)
            reply.raise_for_status()
            found = self._decoder.decode(reply.content)
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            if self.reachable:
                _log.warning("coordinator_lost", error=repr(error))
            self.reachable = False
            return
        self.reachable = True
        self.accept(found.instances)

    def accept(self, instances: list[InstanceView]) -> None:
        """Take over a list of members."""
        before = [(v.instance, v.epoch, v.endpoint, v.state) for v in self.instances]
        self.instances = instances
        live = [v for v in instances if v.state == "live" and v.description.model == self._model]
        if live:
            self.description = live[0].description
        if [(v.instance, v.epoch, v.endpoint, v.state) for v in instances] != before:
            _log.info("members_changed", members=[f"{v.instance}:{v.state}:{v.epoch}" for v in instances])
            if self._on_change is not None:
                self._on_change(instances)
