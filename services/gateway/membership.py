"""Who is in the cluster: asks the coordinator each second and keeps the last answer.

The gateway needs it for the model's description (fingerprint, block size, context length) and to connect to
workers before the first request names them. Losing the coordinator changes nothing for requests.
"""

from collections.abc import Callable

import msgspec

from shared.errors import SettingsError
from shared.kv.layout import EngineDescription
from shared.observe.log import get_logger
from shared.transport.membership_client import MembershipPoller
from shared.wire.membership import InstanceList, InstanceView

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
        self._url = coordinator_url
        self._key = key
        self._model = model
        self._interval_ms = interval_ms
        self._on_change = on_change
        self._poller: MembershipPoller | None = None

    @property
    def reachable(self) -> bool:
        """The coordinator answered when it was last asked."""
        return self._poller is not None and self._poller.reachable

    async def start(self) -> None:
        """Ask once, then in the background. An absent coordinator is no error."""
        self._poller = MembershipPoller(
            self._url,
            key=self._key,
            interval_ms=self._interval_ms,
            on_list=self._accept,
            on_event=lambda event, ids: _log.info(event, **ids),
        )
        self._poller.open()
        await self._poller.asked.wait()

    async def stop(self) -> None:
        """End the polling."""
        if self._poller is not None:
            await self._poller.close()

    def _accept(self, found: InstanceList) -> None:
        self.instances = found.instances
        ours = [v for v in found.instances if v.state != "dead" and v.description.model == self._model]
        live = [view for view in ours if view.state == "live"]
        if live:
            self.description = self._describe(live, ours)
        _log.info("members_changed", members=[f"{v.instance}:{v.state}:{v.epoch}" for v in found.instances])
        if self._on_change is not None:
            self._on_change(found.instances)

    def _describe(self, live: list[InstanceView], ours: list[InstanceView]) -> EngineDescription:
        """The model that the scheduler admits: the one known, else of who came first; with the context that all of
        its instances take. Raises: SettingsError, which ends the process: its tokenizer is of a model that has left.
        """
        known = self.description or min(live, key=lambda view: view.epoch).description
        alike = [view for view in ours if view.description.fingerprint == known.fingerprint]
        if not alike:
            raise SettingsError(
                "another model has this one's name now: the gateway starts anew and reads its files"
            )
        oldest = min(alike, key=lambda view: view.epoch).description
        lens = [view.description.max_model_len for view in alike if view.description.max_model_len]
        return msgspec.structs.replace(oldest, max_model_len=min(lens, default=0))
