"""Lending of memory: offers and leases. Carried from the first version so that
every message that names lent pages has its fence; the coordinator's market fills them."""

from msgspec import Struct

from shared.ids import Epoch, InstanceId, LeaseId


class Offer(Struct, frozen=True, kw_only=True):
    """A producer's revocable advert of spare bytes."""

    offer_id: str
    producer: InstanceId
    producer_epoch: Epoch
    length_bytes: int
    page_bytes: int
    medium: str  # "hbm" | "dram"


class LeaseGranted(Struct, frozen=True, kw_only=True, tag="lease_granted"):
    """The consumer counts expires_in_ms from when it asked, so it always stops first."""

    lease_id: LeaseId
    offer_id: str
    fencing_token: Epoch  # a holder that sees a larger one stops writing
    length_bytes: int
    expires_in_ms: int  # a duration, because hosts share no clock


class LeaseRefused(Struct, frozen=True, kw_only=True, tag="lease_refused"):
    """No offer fits now."""

    reason: str


LeaseReply = LeaseGranted | LeaseRefused
