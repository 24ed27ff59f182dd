"""Which offer a consumer is lent from."""

from collections.abc import Iterator
from dataclasses import dataclass

from services.coordinator.core.market_book import Book
from services.coordinator.core.market_records import OfferRecord
from shared.ids import InstanceId
from shared.wire.lending import AskLease, SpaceReport


@dataclass(frozen=True, slots=True)
class Choice:
    """`offer` None: nothing fits; `largest_bytes`: that one lease could get."""

    offer: OfferRecord | None
    length_bytes: int
    largest_bytes: int


def choose(book: Book, ask: AskLease, now_ms: int) -> Choice:
    """The best offer for `ask`, and how much of it.

    In this order: the producer that the placer paired with this consumer, and last one that it paired with
    another (AQUA 5: one producer, one consumer); the consumer's own order of spaces; a producer that lends to
    it already, then one that lends to nobody, because a producer's link is shared by all its consumers; all
    of the bytes rather than some; the fullest offer that fits, so that large ones stay whole. Bytes count in
    whole pages of the lender: its mempool takes no others. Cost: one pass over the offers and their leases.
    """
    spaces = {(space.mempool, space.space): rank for rank, space in reversed(list(enumerate(ask.spaces)))}
    producers = {pair.producer: pair.consumer for pair in book.pairs}
    wanted = {pair.producer for pair in book.pairs if pair.consumer == ask.consumer}
    least_bytes = ask.min_bytes or ask.length_bytes
    units = {(mempool, each.space): each.unit_bytes for mempool, each in _reported(book, ask)}
    ranked, largest_bytes = [], 0
    for record in book.offers.values():
        offer = record.offer
        mempool = book.mempools.get(offer.mempool)
        rank = spaces.get((offer.mempool, offer.space))
        if rank is None or mempool is None or offer.producer == ask.consumer:
            continue
        if not mempool.is_live(now_ms, book.limits.report_ttl_ms):
            continue
        unit_bytes = units.get((offer.mempool, offer.space), 1)
        free_bytes = _whole(record.limit_bytes - book.leased_bytes(offer.offer_id), unit_bytes)
        largest_bytes = max(largest_bytes, free_bytes)
        can_bytes = min(free_bytes, _whole(ask.length_bytes, unit_bytes))
        if can_bytes < max(1, _whole(least_bytes, unit_bytes)):
            continue
        pair = 0 if offer.producer in wanted else 2 if offer.producer in producers else 1
        shared = _sharing(book, record, ask.consumer)
        short_bytes = max(0, ask.length_bytes - free_bytes)
        ranked.append((pair, rank, shared, short_bytes, free_bytes, offer.offer_id, can_bytes))
    if not ranked:
        return Choice(None, 0, largest_bytes)
    *_, offer_id, can_bytes = min(ranked)
    return Choice(book.offers[offer_id], can_bytes, largest_bytes)


def _reported(book: Book, ask: AskLease) -> Iterator[tuple[InstanceId, SpaceReport]]:
    for name in {ref.mempool for ref in ask.spaces} & book.mempools.keys():
        for each in book.mempools[name].spaces:
            yield name, each


def _whole(num_bytes: int, unit_bytes: int) -> int:
    return num_bytes // unit_bytes * unit_bytes


def _sharing(book: Book, record: OfferRecord, consumer: str) -> int:
    """0: the offer lends to this consumer already; 1: to nobody; 2: to others."""
    consumers = {lease.grant.consumer for lease in book.leases_of(record.offer.offer_id)}
    return 0 if consumer in consumers else 2 if consumers else 1
