"""The market's tables, and what keeps them consistent: sums, keys, history, journal. Decides nothing."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from services.coordinator.core.market_records import (
    LeaseEntry,
    LeaseRecord,
    MarketEntry,
    MarketLimits,
    MempoolEntry,
    MempoolRecord,
    OfferEntry,
    OfferRecord,
    PlacementEntry,
    ReclaimEntry,
    ReclaimRecord,
)
from services.coordinator.core.market_table import Event
from shared.ids import Epoch, InstanceId, LeaseId
from shared.lending.budget import SLOWEST_BYTES_PER_S
from shared.wire.lending import MAX_DURATION_MS, HistoryEntry, Pair, reclaim_shares

Kind = str  # "offer" | "lease" | "reclaim"
HELD_STATES = ("held", "reclaiming", "releasing")


@dataclass(slots=True)
class Book:
    """All tables. `journal`: field -> what the shell must store, None: remove it. `events`: for its log."""

    limits: MarketLimits
    term: int = 0  # of this coordinator's leadership; 0: it never led
    next_number: int = 1  # of the next token of this term
    next_id: int = 1  # of the next offer or reclaim of this term
    mempools: dict[InstanceId, MempoolRecord] = field(default_factory=dict)
    offers: dict[str, OfferRecord] = field(default_factory=dict)
    leases: dict[LeaseId, LeaseRecord] = field(default_factory=dict)
    by_offer: dict[str, dict[LeaseId, LeaseRecord]] = field(default_factory=dict)
    reclaims: dict[str, ReclaimRecord] = field(default_factory=dict)
    epochs: dict[InstanceId, Epoch] = field(default_factory=dict)  # newest of each member
    pairs: list[Pair] = field(default_factory=list)
    keys: dict[tuple[Kind, InstanceId, str], str] = field(default_factory=dict)
    journal: dict[str, MarketEntry | None] = field(default_factory=dict)
    events: list[tuple[str, str, str]] = field(default_factory=list)
    history: deque[tuple[int, HistoryEntry]] = field(default_factory=deque)

    # --- sums

    def leases_of(self, offer_id: str) -> Iterator[LeaseRecord]:
        """Those that are not proven dead."""
        return (lease for lease in self.by_offer.get(offer_id, {}).values() if lease.state != "ended")

    def leased_bytes(self, offer_id: str) -> int:
        """Granted or held, and not proven dead."""
        return sum(lease.held_bytes for lease in self.leases_of(offer_id))

    def open_reclaims(self, offer_id: str) -> Iterator[ReclaimRecord]:
        """Reclaims of one offer that are not done."""
        return (r for r in self.reclaims.values() if r.offer_id == offer_id and r.done_at_ms is None)

    def deadline_ms(self, offer_id: str, now_ms: int) -> int:
        """What is left until the offer's nearest reclaim; 0 without one."""
        return min((r.order(now_ms).deadline_ms for r in self.open_reclaims(offer_id)), default=0)

    def share_out(self, offer_id: str, now_ms: int) -> None:
        """Tell the leases of an offer what they may keep, and who need not give back any more."""
        offer = self.offers.get(offer_id)
        held = [lease for lease in self.leases_of(offer_id) if lease.state in HELD_STATES]
        keep_bytes = offer.target_bytes if offer is not None and not offer.closed else 0
        shares = reclaim_shares(((x.grant.token, x.grant.lease_id, x.held_bytes) for x in held), keep_bytes)
        for lease in held:
            lease.keep_bytes = shares[lease.grant.lease_id]
            if lease.state == "held" and lease.keep_bytes < lease.held_bytes:
                self.move(lease, "reclaim", now_ms)
            elif lease.state == "reclaiming" and lease.keep_bytes >= lease.held_bytes:
                self.move(lease, "fits", now_ms)

    # --- changes

    def add_lease(self, lease: LeaseRecord) -> None:
        """A new one, granted or found."""
        grant = lease.grant
        self.leases[grant.lease_id] = lease
        self.by_offer.setdefault(grant.offer_id, {})[grant.lease_id] = lease
        self.set_key("lease", grant.consumer, grant.key, grant.lease_id)

    def move(self, lease: LeaseRecord, event: Event, now_ms: int) -> None:
        """Follow the table, journal and remember it."""
        if not lease.move(event, now_ms):
            return
        lease_id = lease.grant.lease_id
        if lease.state == "ended":
            lease.wants_renewal = False
            self.journal[f"lease:{lease_id}"] = None
        elif event == "released":
            self.write_lease(lease)
        self.note(f"lease_{lease.state}", lease_id, f"{lease.grant.consumer}: {event}", now_ms)

    def open_reclaim(
        self,
        offer: OfferRecord,
        keep_bytes: int,
        deadline_ms: int,
        key: str,
        now_ms: int,
        *,
        of_nobody: bool = False,
    ) -> ReclaimRecord:
        """From now on the offer is worth keep_bytes."""
        offer_id = offer.offer.offer_id
        reclaim = ReclaimRecord(
            self.make_id("r"), offer_id, keep_bytes, deadline_ms, now_ms, key=key, of_nobody=of_nobody
        )
        self.reclaims[reclaim.reclaim_id] = reclaim
        self.set_key("reclaim", offer.offer.producer, key, reclaim.reclaim_id)
        offer.target_bytes = min(offer.target_bytes, keep_bytes)
        self.write_offer(offer)
        self.write_reclaim(reclaim)
        detail = f"{offer_id}: down to {keep_bytes} bytes in {deadline_ms} ms"
        self.note("reclaim_asked", reclaim.reclaim_id, detail, now_ms)
        self.share_out(offer_id, now_ms)
        return reclaim

    def vacate(self, offer: OfferRecord, keep_bytes: int, now_ms: int) -> None:
        """open_reclaim() in nobody's name. Who reads in place what is lent is killed at the deadline: it has the
        time that moving all of it takes, from when its mempool hears of it."""
        deadline_ms = self.limits.orphan_deadline_ms
        deadline_ms += self.leased_bytes(offer.offer.offer_id) * 1_000 // SLOWEST_BYTES_PER_S
        self.open_reclaim(offer, keep_bytes, min(MAX_DURATION_MS, deadline_ms), "", now_ms, of_nobody=True)

    def make_id(self, prefix: str) -> str:
        """A new one, also across restarts: terms differ."""
        self.next_id += 1
        return f"{prefix}-{self.term}-{self.next_id - 1}"

    def close_offer(self, offer: OfferRecord, why: str, now_ms: int) -> None:
        """Nothing is lent on it any more, as far as this coordinator knows."""
        if not offer.closed:
            offer.closed, offer.reported_bytes, offer.changed_at_ms = True, None, now_ms
            self.write_offer(offer)
            self.note("offer_closed", offer.offer.offer_id, f"{offer.offer.producer}: {why}", now_ms)

    def finish_reclaim(self, reclaim: ReclaimRecord, now_ms: int) -> None:
        """The producer has its bytes: a report proves it."""
        reclaim.done_at_ms = now_ms
        self._unwrite_reclaim(reclaim)
        took_ms = now_ms - reclaim.asked_at_ms
        self.note("reclaim_done", reclaim.reclaim_id, f"{reclaim.offer_id}: {took_ms} ms", now_ms)

    def lose_reclaim(self, reclaim: ReclaimRecord, now_ms: int) -> None:
        """Nobody is left who could say whether it is done."""
        del self.reclaims[reclaim.reclaim_id]
        self._unwrite_reclaim(reclaim)
        self.note("reclaim_lost", reclaim.reclaim_id, reclaim.offer_id, now_ms)

    def _unwrite_reclaim(self, reclaim: ReclaimRecord) -> None:
        self.journal[f"reclaim:{reclaim.reclaim_id}"] = None
        offer = self.offers.get(reclaim.offer_id)
        if offer is not None and offer.closed:
            self.write_offer(offer)

    def note(self, event: str, subject: str, detail: str, now_ms: int) -> None:
        """Into the history and the log."""
        self.events.append((event, subject, detail))
        self.remember(HistoryEntry(event=event, subject=subject, detail=detail, age_ms=0), now_ms)

    def remember(self, entry: HistoryEntry, now_ms: int) -> None:
        """Into the history only; what is oldest falls out."""
        self.history.append((now_ms, entry))
        while len(self.history) > self.limits.max_history:
            self.history.popleft()

    def forget(self, now_ms: int) -> None:
        """Drop what ended forget_after_ms ago, with its keys."""
        before_ms = now_ms - self.limits.forget_after_ms
        for lease in _drop(self.leases, lambda x: x.state == "ended" and x.changed_at_ms <= before_ms):
            mates = self.by_offer[lease.grant.offer_id]
            del mates[lease.grant.lease_id]
            if not mates:
                del self.by_offer[lease.grant.offer_id]
        _drop(self.reclaims, lambda x: x.done_at_ms is not None and x.done_at_ms <= before_ms)
        used = {x.offer_id for x in self.reclaims.values() if x.done_at_ms is None} | self.by_offer.keys()
        _drop(
            self.offers, lambda x: x.closed and x.changed_at_ms <= before_ms and x.offer.offer_id not in used
        )
        known: dict[Kind, Any] = {"offer": self.offers, "lease": self.leases, "reclaim": self.reclaims}
        _drop_keys(self.keys, lambda kind, record_id: record_id in known[kind])

    # --- journal

    def write_mempool(self, mempool: MempoolRecord) -> None:
        """To be stored."""
        self.journal[f"mempool:{mempool.mempool}"] = MempoolEntry(
            mempool=mempool.mempool, boot_generation=mempool.boot_generation, address=mempool.address
        )

    def write_offer(self, offer: OfferRecord) -> None:
        """To be stored, for as long as it is open or has an open reclaim."""
        offer_id = offer.offer.offer_id
        is_over = offer.closed and not any(self.open_reclaims(offer_id))
        entry = OfferEntry(offer=offer.offer, target_bytes=offer.target_bytes, closed=offer.closed)
        self.journal[f"offer:{offer_id}"] = None if is_over else entry

    def write_lease(self, lease: LeaseRecord) -> None:
        """To be stored."""
        self.journal[f"lease:{lease.grant.lease_id}"] = LeaseEntry(
            grant=lease.grant, producer=lease.producer, released=lease.state == "releasing"
        )

    def write_reclaim(self, reclaim: ReclaimRecord) -> None:
        """To be stored, with the whole deadline."""
        order = reclaim.order(reclaim.asked_at_ms)
        self.journal[f"reclaim:{reclaim.reclaim_id}"] = ReclaimEntry(
            order=order, key=reclaim.key, of_nobody=reclaim.of_nobody
        )

    def write_pairs(self) -> None:
        """To be stored."""
        self.journal["placement"] = PlacementEntry(pairs=self.pairs)

    def write_all(self) -> None:
        """The store may have lost everything."""
        for mempool in self.mempools.values():
            self.write_mempool(mempool)
        for offer in self.offers.values():
            self.write_offer(offer)
        for lease in self.leases.values():
            if lease.state != "ended":
                self.write_lease(lease)
        for reclaim in self.reclaims.values():
            if reclaim.done_at_ms is None:
                self.write_reclaim(reclaim)
        if self.pairs:
            self.write_pairs()

    def restore(self, entries: Iterable[MarketEntry], now_ms: int) -> None:
        """Take over what an earlier leader wrote; what is known here is newer."""
        for entry in entries:
            match entry:
                case MempoolEntry():
                    record = MempoolRecord(
                        entry.mempool, entry.boot_generation, entry.address, seen_at_ms=now_ms
                    )
                    self.mempools.setdefault(entry.mempool, record)
                case OfferEntry(offer=offer):
                    record = OfferRecord(offer, entry.target_bytes, now_ms, closed=entry.closed)
                    self.offers.setdefault(offer.offer_id, record)
                    self.set_key("offer", offer.producer, offer.key, offer.offer_id)
                case LeaseEntry(grant=grant):
                    state = "releasing" if entry.released else "granted"
                    if grant.lease_id not in self.leases:
                        self.add_lease(LeaseRecord(grant, entry.producer, state, grant.length_bytes, now_ms))
                case ReclaimEntry(order=order):
                    self.reclaims.setdefault(
                        order.reclaim_id,
                        ReclaimRecord(
                            order.reclaim_id, order.offer_id, order.keep_bytes, order.deadline_ms, now_ms,
                            key=entry.key, of_nobody=entry.of_nobody,
                        ),
                    )  # fmt: skip
                case PlacementEntry():
                    self.pairs = self.pairs or entry.pairs
        for reclaim in self.reclaims.values():
            offer = self.offers.get(reclaim.offer_id)
            if offer is not None:
                self.set_key("reclaim", offer.offer.producer, reclaim.key, reclaim.reclaim_id)

    def keep_reclaims(self, known: "Book") -> None:
        """Reclaims that this process acknowledged in an earlier term while the store, which they do not need, was away:
        the producer counts on them."""
        for reclaim in known.reclaims.values():
            offer = self.offers.get(reclaim.offer_id)
            if offer is None or reclaim.done_at_ms is not None or reclaim.reclaim_id in self.reclaims:
                continue
            self.reclaims[reclaim.reclaim_id] = reclaim
            self.set_key("reclaim", offer.offer.producer, reclaim.key, reclaim.reclaim_id)
            offer.target_bytes = min(offer.target_bytes, reclaim.keep_bytes)

    def set_key(self, kind: Kind, owner: InstanceId, key: str, record_id: str) -> None:
        """Remember what a key stands for; the first one counts."""
        if key:
            self.keys.setdefault((kind, owner, key), record_id)


T = TypeVar("T")


def _drop(table: dict[Any, T], is_old: Callable[[T], bool]) -> list[T]:
    return [table.pop(name) for name in [name for name, record in table.items() if is_old(record)]]


def _drop_keys(keys: dict[tuple[Kind, InstanceId, str], str], is_known: Callable[[str, str], bool]) -> None:
    for key in [key for key, record_id in keys.items() if not is_known(key[0], record_id)]:
        del keys[key]
