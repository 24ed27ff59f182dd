"""What the providers share: registered regions, the thread, the quarantine, the links, who hears of losses."""

from collections.abc import Callable

from shared.errors import SettingsError
from shared.observe.log import get_logger
from shared.transfer.describe import EndDescription, describe_region, encode, this_boot_id, this_pid_namespace
from shared.transfer.interface import Link, OnPeerLost, PathName, Peer, Region
from shared.transfer.link import BaseLink
from shared.transfer.quarantine import Quarantine
from shared.transfer.transfer_thread import TransferThread

RELEASE_S = 10.0

log = get_logger("transfer")


class BaseTransport:
    """See interface.Transport. Subclasses give `path`, `connect`, and what they add to register and describe.

    Providers of one process share a quarantine: a page is in one transfer at a time, whatever its path.
    """

    path: PathName

    def __init__(
        self,
        instance: str,
        *,
        quarantine: Quarantine | None = None,
        progress: Callable[[], None] | None = None,
    ) -> None:
        self.instance = instance
        self.regions: dict[str, Region] = {}
        self.links: list[BaseLink] = []
        self._quarantine = quarantine or Quarantine()
        self._lost_callbacks: list[OnPeerLost] = []
        self._broken = ""  # why no link is of use any more
        self._thread = TransferThread(f"transfer-{self.path}", progress=progress, on_error=self._on_error)

    def register(self, region: Region) -> None:
        """See interface.Transport."""
        if region.name in self.regions:
            raise SettingsError(
                f"region {region.name!r} is registered already; give each region its own name"
            )
        self.regions[region.name] = region

    def describe(self) -> bytes:
        """See interface.Transport."""
        payload = self._payload()
        return encode(
            EndDescription(
                instance=self.instance,
                boot_id=this_boot_id(),
                pid_ns=this_pid_namespace(),
                regions=tuple(describe_region(region) for region in self.regions.values()),
                payloads={} if payload is None else {self.path.value: payload},
            )
        )

    def connect(self, peer: Peer) -> Link:
        """See interface.Transport."""
        link = self._open(peer)
        self.links.append(link)
        if self._broken:
            link.peer_lost(self._broken)
        return link

    def on_peer_lost(self, callback: OnPeerLost) -> None:
        """See interface.Transport."""
        self._lost_callbacks.append(callback)

    def close(self) -> None:
        """See interface.Transport. What does not end within RELEASE_S is left to the thread, and said."""
        for link in self.links:
            link.close()
        try:
            self._thread.call(self._release).result(RELEASE_S)
        except TimeoutError:
            log.error("transport_not_released", path=self.path.value, instance=self.instance)
        finally:
            self._thread.close()

    def _open(self, peer: Peer) -> BaseLink:
        """A link of this path."""
        raise SettingsError(f"path {self.path} opens no links")

    def _payload(self) -> bytes | None:
        """What this path's connect() needs at the other end."""
        return None

    def _release(self) -> None:
        """Free what the provider owns. On the thread."""

    def _on_error(self, error: Exception) -> None:
        """Something on the thread raised, which goes on; transfers that it concerns end by their deadlines at last."""

    def _lost(self, instance: str, reason: str) -> None:
        for callback in self._lost_callbacks:
            callback(instance, reason)
