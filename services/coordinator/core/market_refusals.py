"""Refusals that several calls of the market give."""

from services.coordinator.core.market_records import LeaseRecord
from shared.ids import Epoch, InstanceId
from shared.wire.lending import LendingRefused


def mismatch(key: str) -> LendingRefused:
    """The idempotency key stands for another wish."""
    return LendingRefused(code="idempotency.mismatch", message=f"key {key!r} was used for something else")


def ended(lease: LeaseRecord) -> LendingRefused:
    """The lease is over."""
    return LendingRefused(code="lease.ended", message=f"lease {lease.grant.lease_id} is over")


def full(what: str) -> LendingRefused:
    """A bound of the market is reached."""
    return LendingRefused(code="market.full", message=f"{what} are the most", retry_after_ms=1_000)


def stale(instance: InstanceId, epoch: Epoch, current: Epoch) -> LendingRefused:
    """Another process has the instance's id now."""
    return LendingRefused(code="epoch.stale", message=f"{instance} has epoch {current}, not {epoch}")
