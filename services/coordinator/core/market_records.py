"""What the coordinator keeps of mempools, offers, leases and reclaims. Instants are this process's monotonic
clock."""

from dataclasses import dataclass, field

from msgspec import Struct

from services.coordinator.core.market_table import Event, next_state
from shared.ids import Epoch, InstanceId
from shared.wire.lending import (
    AskLease,
    Grant,
    LeaseState,
    LeaseView,
    MempoolView,
    Offer,
    OfferMemory,
    OfferView,
    Pair,
    ReclaimOrder,
    ReclaimView,
    SpaceReport,
    Token,
)

NO_BOOT = Epoch(0)
NO_FENCE = Token(0, 0)


@dataclass(frozen=True, slots=True)
class MarketLimits:
    """Times and bounds; services/coordinator/config.py says what each setting means."""

    lease_ttl_ms: int = 10_000
    ttl_margin_ms: int = 1_000
    present_ms: int = 3_000
    report_interval_ms: int = 250
    report_idle_ms: int = 1_000
    report_ttl_ms: int = 3_000
    forget_after_ms: int = 60_000
    # a reclaim waits so long for a mempool that is gone: none is cut off for longer
    lost_after_ms: int = 86_400_000
    orphan_deadline_ms: int = 5_000
    max_offers: int = 1_024
    max_leases: int = 16_384
    max_reclaims: int = 64  # open ones of one offer: each is in every answer to its mempool's reports
    max_mempools: int = 256
    max_history: int = 200


@dataclass(slots=True)
class MempoolRecord:
    """One mempool. `confirmed`: it reported a fence of this term, so what it lists is all there can be."""

    mempool: InstanceId
    boot_generation: Epoch = NO_BOOT
    address: str = ""
    host: str = ""
    seq: int = -1
    fence: Token = NO_FENCE
    spaces: list[SpaceReport] = field(default_factory=list)
    seen_at_ms: int = 0  # or when it began to be awaited
    heard: bool = False  # in this term
    confirmed: bool = False

    def is_live(self, now_ms: int, ttl_ms: int) -> bool:
        """Whether its offers may be lent from."""
        return self.confirmed and now_ms - self.seen_at_ms < ttl_ms

    def view(self, now_ms: int, ttl_ms: int) -> MempoolView:
        """For people."""
        silent = now_ms - self.seen_at_ms >= ttl_ms
        return MempoolView(
            mempool=self.mempool,
            address=self.address,
            boot_generation=self.boot_generation,
            state="silent" if silent else ("live" if self.confirmed else "awaited"),
            age_ms=now_ms - self.seen_at_ms,
            fence=self.fence,
            spaces=self.spaces,
        )


@dataclass(slots=True)
class OfferRecord:
    """An offer. `target_bytes`: what its producer still offers; `reported_bytes`: what its mempool said it
    lends."""

    offer: Offer
    target_bytes: int
    changed_at_ms: int
    reported_bytes: int | None = None  # None: the mempool does not list it
    leased_bytes: int = 0  # as its mempool said
    closed: bool = False

    @property
    def limit_bytes(self) -> int:
        """The most that may be lent on it."""
        return (
            0 if self.closed or self.reported_bytes is None else min(self.reported_bytes, self.target_bytes)
        )

    @property
    def state(self) -> str:
        """As OfferView says it."""
        if self.closed:
            return "closed"
        if self.reported_bytes is None:
            return "proposed"
        over = max(self.reported_bytes, self.leased_bytes) > self.target_bytes
        return "reclaiming" if over else "open"

    def is_answer_to(self, ask: OfferMemory) -> bool:
        """Whether a repeated call can mean this offer."""
        offer = self.offer
        return (offer.producer, offer.mempool, offer.space) == (ask.producer, ask.mempool, ask.space) and (
            offer.length_bytes <= ask.length_bytes  # less when it was found in a report, after a reclaim
        )

    def view(self, leased_bytes: int) -> OfferView:
        """For the producer and for people. leased_bytes: by the leases that are not ended."""
        return OfferView(
            offer=self.offer, state=self.state, limit_bytes=self.limit_bytes, leased_bytes=leased_bytes
        )


@dataclass(slots=True)
class LeaseRecord:
    """A lease: granted by this coordinator, or found in a report."""

    grant: Grant
    producer: InstanceId
    state: LeaseState
    held_bytes: int
    changed_at_ms: int
    remaining_ms: int = 0  # of its time, at seen_at_ms
    seen_at_ms: int = 0
    keep_bytes: int = 0
    was_listed: bool = False  # by a report that this coordinator saw
    wants_renewal: bool = False

    @property
    def mempool(self) -> InstanceId:
        """Its owner."""
        return self.grant.mempool

    def move(self, event: Event, now_ms: int) -> bool:
        """Follow the table. Returns whether the state changed."""
        state = next_state(self.state, event)
        changed = state != self.state
        if changed:
            self.state, self.changed_at_ms = state, now_ms
        return changed

    def left_ms(self, now_ms: int) -> int:
        """Of its time, by the mempool's last report."""
        return max(0, self.remaining_ms - (now_ms - self.seen_at_ms)) if self.was_listed else 0

    def is_answer_to(self, ask: AskLease) -> bool:
        """Whether a repeated call can mean this lease."""
        grant = self.grant
        return (grant.consumer, grant.purpose) == (ask.consumer, ask.purpose) and (
            grant.length_bytes <= ask.length_bytes
        )

    def view(self, now_ms: int, deadline_ms: int) -> LeaseView:
        """For people. deadline_ms: of its offer's nearest reclaim."""
        grant, reclaiming = self.grant, self.state == "reclaiming"
        return LeaseView(
            lease_id=grant.lease_id,
            offer_id=grant.offer_id,
            consumer=grant.consumer,
            producer=self.producer,
            mempool=grant.mempool,
            space=grant.space,
            purpose=grant.purpose,
            length_bytes=self.held_bytes,
            token=grant.token,
            state=self.state,
            remaining_ms=self.left_ms(now_ms),
            keep_bytes=self.keep_bytes if reclaiming else 0,
            deadline_ms=deadline_ms if reclaiming else 0,
        )


@dataclass(slots=True)
class ReclaimRecord:
    """A producer's wish to have bytes back."""

    reclaim_id: str
    offer_id: str
    keep_bytes: int
    asked_ms: int  # the deadline as a duration, for the journal
    asked_at_ms: int
    done_at_ms: int | None = None
    key: str = ""
    # nobody waits for the bytes: their readers have the whole time from when their mempool hears of it
    of_nobody: bool = False
    told: bool = False  # so far, of one of nobody

    def tell(self, now_ms: int) -> ReclaimOrder:
        """To its mempool, with an answer."""
        if self.of_nobody and not self.told:
            self.told, self.asked_at_ms = True, now_ms
        return self.order(now_ms)

    def order(self, now_ms: int) -> ReclaimOrder:
        """What its mempool would be told now."""
        begun = self.told or not self.of_nobody
        left_ms = max(0, self.asked_ms - (now_ms - self.asked_at_ms)) if begun else self.asked_ms
        return ReclaimOrder(
            reclaim_id=self.reclaim_id,
            offer_id=self.offer_id,
            keep_bytes=self.keep_bytes,
            deadline_ms=left_ms,
        )

    def covers(self, keep_bytes: int, deadline_ms: int, now_ms: int) -> bool:
        """Whether it brings back as much, as soon."""
        return self.keep_bytes <= keep_bytes and self.order(now_ms).deadline_ms <= deadline_ms

    def view(self, now_ms: int, leased_bytes: int) -> ReclaimView:
        """For the producer. leased_bytes: on the offer."""
        done = self.done_at_ms is not None
        return ReclaimView(
            order=self.order(now_ms),
            state="done" if done else "open",
            over_bytes=0 if done else max(0, leased_bytes - self.keep_bytes),
            took_ms=self.done_at_ms - self.asked_at_ms if self.done_at_ms is not None else 0,
        )


# --- what the journal keeps: one field each, JSON


class MempoolEntry(Struct, frozen=True, kw_only=True, tag="mempool"):
    """A mempool that a later leader must wait for."""

    mempool: InstanceId
    boot_generation: Epoch
    address: str


class OfferEntry(Struct, frozen=True, kw_only=True, tag="offer"):
    """An offer and what its producer still offers of it. `closed`: only its reclaims are waited for."""

    offer: Offer
    target_bytes: int
    closed: bool = False


class LeaseEntry(Struct, frozen=True, kw_only=True, tag="lease"):
    """An intention: it may or may not have been presented. `released`: the consumer gave it up."""

    grant: Grant
    producer: InstanceId
    released: bool = False


class ReclaimEntry(Struct, frozen=True, kw_only=True, tag="reclaim"):
    """A reclaim with its whole deadline: its mempool keeps the earliest that it heard."""

    order: ReclaimOrder
    key: str = ""
    of_nobody: bool = False


class PlacementEntry(Struct, frozen=True, kw_only=True, tag="placement"):
    """The placer's pairs."""

    pairs: list[Pair]


MarketEntry = MempoolEntry | OfferEntry | LeaseEntry | ReclaimEntry | PlacementEntry
