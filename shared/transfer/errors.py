"""What can go wrong between two ends. Each error says which target pages may still be written.

PeerError
├─ TransferError        code, quarantined: target pages that are not reusable yet
│  ├─ TransferTimeout   504  the deadline passed
│  ├─ PeerLost          503  the peer died or the connection to it broke
│  └─ TransferFailed    503  the path refused or broke
└─ TransferRefused      502  wrong region, page or size; nothing was started
ResourceError
├─ TransferQueueFull    503  too many transfers in flight on this link
└─ PathUnavailable      503  this process cannot take that path (library, device, descriptor missing)
SettingsError
└─ LinkTooSlow               the start-up self-test stayed under its floor
"""

from collections.abc import Iterable

from shared.errors import PeerError, ResourceError, SettingsError


class TransferError(PeerError):
    """A started transfer ended without its bytes in place.

    `quarantined` holds the target pages that something may still write; the link reports them as settled later,
    or when the peer is proven dead. Other target pages of the transfer hold garbage but may be reused at once.
    """

    code = "transfer.error"

    def __init__(self, message: str, *, quarantined: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.quarantined = tuple(quarantined)


class TransferTimeout(TransferError):
    """The deadline passed first."""

    code = "transfer.timeout"
    http_status = 504


class PeerLost(TransferError):
    """The peer died, or the connection to it broke."""

    code = "transfer.peer_lost"


class TransferFailed(TransferError):
    """The path refused the work or broke under it."""

    code = "transfer.failed"


class TransferRefused(PeerError):
    """The request cannot mean what it says: unknown region, page out of range, unequal pages. Nothing was started."""

    code = "transfer.refused"
    retryable = False
    http_status = 502


class TransferQueueFull(ResourceError):
    """The bound on transfers in flight is reached; wait for one of them."""

    code = "transfer.queue_full"


class PathUnavailable(ResourceError):
    """This process cannot take the path: a library, a device or a descriptor is missing."""

    code = "transfer.path_unavailable"
    retryable = False


class LinkTooSlow(SettingsError):
    """The start-up self-test measured less than the floor that a setting demands."""

    code = "transfer.link_too_slow"
